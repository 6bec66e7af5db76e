// The rollout browser. Every text of a rollout is set with textContent, never as HTML.
(() => {
  const source = document.getElementById("rollout-index");
  if (!source) return;
  const [RUN, STEP, EVAL, ENV, REWARD, ADVANTAGE, TRUNCATED, ERROR, TOKENS, PREVIEW] = Array(10).keys();
  const ROW_HEIGHT = 52;
  const list = document.getElementById("list"), spacer = document.getElementById("spacer");
  const detail = document.getElementById("detail"), matches = document.getElementById("matches");
  const filters = document.getElementById("filters");
  const packed = [...document.querySelectorAll(".rollout-block")];
  const blocks = new Map();
  let index = null, shown = [], chosen = -1, mode = "messages", found = null, searched = "";

  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  const block = (number) => {
    if (!blocks.has(number)) blocks.set(number, unpack(packed[number].textContent));
    return blocks.get(number);
  };

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const number = (value) => (value === null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 3 }));
  const place = (row) => (row[STEP] !== null ? `step ${row[STEP]}` : `evaluation ${row[EVAL]}`);

  // --- Filters -----------------------------------------------------------------------------------------------------

  const choices = (name, values, words) => {
    const select = filters.elements[name];
    select.append(new Option("all", ""), ...values.map((value) => new Option(words(value), String(value))));
  };

  const startFilters = () => {
    const distinct = (read) => [...new Set(index.rows.map(read))];
    const runs = distinct((row) => row[RUN]), envs = distinct((row) => row[ENV]);
    choices("run", runs, (run) => index.runs[run]);
    choices("step", distinct(place), (words) => words);
    choices("env", envs, (env) => env);
    if (runs.length < 2) document.querySelector("[data-needs=runs]").hidden = true;
    if (envs.length < 2) document.querySelector("[data-needs=envs]").hidden = true;
    let timer;
    filters.addEventListener("input", (event) => {
      clearTimeout(timer);
      timer = setTimeout(select, event.target.name === "search" ? 200 : 0);
    });
    filters.addEventListener("reset", () => setTimeout(select));
    filters.addEventListener("submit", (event) => event.preventDefault());
  };

  const texts = (each) => [...each.prompt, ...each.completion]
    .flatMap((message) => [message.text, message.thoughts ?? "", ...(message.calls ?? []).flatMap((call) => [call.name, call.arguments])])
    .concat(each.error ?? "");

  const search = async (wanted) => {
    const hits = new Set();
    for (let at = 0; at < packed.length; at++) {
      (await block(at)).forEach((each, offset) => {
        if (texts(each).some((text) => text.toLowerCase().includes(wanted))) hits.add(at * index.block + offset);
      });
      if (searched !== wanted) return null;
    }
    return hits;
  };

  const ORDERS = {
    best: (a, b) => (b[REWARD] ?? -Infinity) - (a[REWARD] ?? -Infinity),
    worst: (a, b) => (a[REWARD] ?? Infinity) - (b[REWARD] ?? Infinity),
    longest: (a, b) => (b[TOKENS] ?? 0) - (a[TOKENS] ?? 0),
  };

  const select = async () => {
    const value = (name) => filters.elements[name].value;
    const wanted = value("search").trim().toLowerCase();
    if (wanted !== searched) {
      searched = wanted;
      if (wanted) matches.textContent = "Searching …";
      const hits = wanted ? await search(wanted) : null;
      if (searched !== wanted) return;
      found = hits;
    }
    const low = value("low") === "" ? -Infinity : Number(value("low"));
    const high = value("high") === "" ? Infinity : Number(value("high"));
    const bounded = value("low") !== "" || value("high") !== "";
    shown = [];
    index.rows.forEach((row, at) => {
      if (value("run") !== "" && String(row[RUN]) !== value("run")) return;
      if (value("step") !== "" && place(row) !== value("step")) return;
      if (value("env") !== "" && row[ENV] !== value("env")) return;
      if (bounded && (row[REWARD] === null || row[REWARD] < low || row[REWARD] > high)) return;
      if (value("only") === "truncated" && !row[TRUNCATED]) return;
      if (value("only") === "error" && !row[ERROR]) return;
      if (found && !found.has(at)) return;
      shown.push(at);
    });
    const order = ORDERS[value("sort")];
    if (order) shown.sort((a, b) => order(index.rows[a], index.rows[b]) || a - b);
    matches.textContent = `${shown.length.toLocaleString("en")} of ${index.rows.length.toLocaleString("en")} rollouts`;
    list.scrollTop = 0;
    choose(shown.length ? 0 : -1);
  };

  // --- List: only the rows that are on the screen exist --------------------------------------------------------------

  const rowElement = (position) => {
    const row = index.rows[shown[position]];
    const made = element("div", "row");
    made.id = `row-${position}`;
    made.setAttribute("role", "option");
    made.setAttribute("aria-selected", String(position === chosen));
    made.setAttribute("aria-setsize", String(shown.length));
    made.setAttribute("aria-posinset", String(position + 1));
    made.style.top = `${position * ROW_HEIGHT}px`;
    const top = element("div", "top");
    top.append(element("span", "", place(row)), element("b", "", `reward ${number(row[REWARD])}`));
    if (row[TOKENS] !== null) top.append(element("span", "", `${row[TOKENS]} tokens`));
    if (row[TRUNCATED]) top.append(element("span", "flag", "truncated"));
    if (row[ERROR]) top.append(element("span", "flag", "error"));
    if (index.runs.length > 1) top.append(element("span", "", index.runs[row[RUN]]));
    made.append(top, element("div", "", row[PREVIEW] || "(empty)"));
    made.addEventListener("click", () => choose(position));
    return made;
  };

  const fill = () => {
    spacer.style.height = `${shown.length * ROW_HEIGHT}px`;
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 5);
    const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 10);
    const rows = [];
    for (let position = first; position < last; position++) rows.push(rowElement(position));
    spacer.replaceChildren(...rows);
    if (chosen >= 0) list.setAttribute("aria-activedescendant", `row-${chosen}`);
  };

  const choose = (position) => {
    chosen = position;
    if (position >= 0) {
      const top = position * ROW_HEIGHT;
      if (top < list.scrollTop) list.scrollTop = top;
      if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
    }
    fill();
    showDetail();
  };

  list.addEventListener("scroll", fill);
  list.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (move === undefined || !shown.length || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.min(shown.length - 1, Math.max(0, chosen + move)));
  });

  // --- Detail ------------------------------------------------------------------------------------------------------

  const packedPictures = document.getElementById("rollout-pictures").textContent;
  let unpackedPictures = null;
  const pictures = () => (unpackedPictures ??= packedPictures ? unpack(packedPictures) : Promise.resolve({}));

  // Only pictures of the report's own making: nothing in a rollout is an address.
  const imagesElement = (digests) => {
    const made = element("div", "pictures");
    pictures().then((known) => digests.filter((digest) => Object.hasOwn(known, digest)).forEach((digest) => {
      const image = element("img");
      image.src = known[digest];
      image.alt = image.title = `sha256 ${digest}`;
      made.append(image);
    }));
    return made;
  };

  const messageElement = (message) => {
    const made = element("div", "message");
    made.append(element("b", "", message.role));
    if (message.thoughts) {
      const thoughts = element("div", "message thoughts");
      thoughts.append(element("b", "", "thoughts"), element("div", "text", message.thoughts));
      made.append(thoughts);
    }
    if (message.text) made.append(element("div", "text", message.text));
    if (message.images) made.append(imagesElement(message.images));
    for (const call of message.calls ?? []) {
      made.append(element("b", "", `calls ${call.name}`), element("div", "text", call.arguments));
    }
    return made;
  };

  const VIEWS = {
    messages: "messages",
    engine: "log-probability: engine",
    trainer: "log-probability: trainer",
    difference: "trainer − engine",
    entropy: "entropy",
  };
  const values = (line, view) => view === "difference"
    ? line.trainer.map((value, at) => (value === null || line.engine[at] === null ? null : value - line.engine[at]))
    : line[view];
  const has = (each, view) => each.lines.some((line) => values(line, view).some((value) => value !== null));

  const shade = (value, view) => {
    const size = view === "difference" ? Math.min(1, Math.abs(value) / 1000) : view === "entropy" ? Math.min(1, value / 3000) : Math.min(1, -value / 5000);
    const color = view === "difference" && value > 0 ? "--cold" : "--hot";
    return `rgba(${theme.color(color)}, ${(0.75 * Math.sqrt(Math.max(0, size))).toFixed(3)})`;
  };

  const tokenElements = (line, view) => {
    const shownValues = values(line, view);
    return line.texts.map((text, at) => {
      const value = shownValues[at];
      const made = element("span", at < line.prompt ? "token given" : "token", text);
      if (value !== null) {
        made.style.backgroundColor = shade(value, view);
        made.title = `${VIEWS[view]}: ${(value / 1000).toFixed(3)}` + (view.startsWith("en") && view === "entropy" ? " nats" : `, probability ${Math.exp((line.engine[at] ?? line.trainer[at]) / 1000).toFixed(3)}`);
      }
      return made;
    });
  };

  const LEGENDS = {
    engine: "white: 0, full colour: −5 or less", trainer: "white: 0, full colour: −5 or less",
    difference: "blue: the trainer finds the token likelier, red: the engine does; full colour at ±1", entropy: "full colour at 3 nats",
  };

  const views = (each) => {
    const bar = element("div", "switch");
    bar.setAttribute("role", "group");
    bar.setAttribute("aria-label", "View");
    for (const [view, title] of Object.entries(VIEWS)) {
      if (view !== "messages" && !has(each, view)) continue;
      const button = element("button", "", title);
      button.type = "button";
      button.setAttribute("aria-pressed", String(view === mode));
      button.addEventListener("click", () => { mode = view; showDetail(); });
      bar.append(button);
    }
    return bar;
  };

  const chips = (pairs) => {
    const made = element("div", "chips");
    for (const [name, value] of pairs) {
      const chip = element("span", "", `${name} `);
      chip.append(element("b", "", typeof value === "number" ? number(value) : String(value)));
      made.append(chip);
    }
    return made;
  };

  const showDetail = async () => {
    if (chosen < 0) { detail.replaceChildren(element("p", "fine", "No rollout matches.")); return; }
    const at = shown[chosen], row = index.rows[at];
    const each = (await block(Math.floor(at / index.block)))[at % index.block];
    if (shown[chosen] !== at) return;
    if (mode !== "messages" && !has(each, mode)) mode = "messages";
    const parts = [element("h3", "", `${place(row)}, ${row[ENV]}${index.runs.length > 1 ? `, ${index.runs[row[RUN]]}` : ""}`)];
    const scores = [["reward", row[REWARD]], ["advantage", row[ADVANTAGE]]].filter((pair) => pair[1] !== null);
    parts.push(chips(scores));
    const weighted = Object.entries(each.metrics).map(([name, value]) => [each.weights[name] ? `${name} × ${number(each.weights[name])}` : name, value]);
    if (weighted.length) parts.push(chips(weighted));
    if (Object.keys(each.facts).length) parts.push(chips(Object.entries(each.facts)));
    if (each.error) { const box = element("div", "message"); box.append(element("b", "", "error"), element("div", "text", each.error)); parts.push(box); }
    if (each.lines.length) parts.push(views(each));
    if (mode === "messages") {
      parts.push(...each.prompt.map(messageElement), element("hr"), ...each.completion.map(messageElement));
    } else {
      parts.push(element("p", "fine", LEGENDS[mode]));
      each.lines.forEach((line, number) => {
        const box = element("div", "message");
        if (each.lines.length > 1) box.append(element("b", "", `conversation ${number + 1}`));
        const text = element("div", "text");
        text.append(...tokenElements(line, mode));
        box.append(text);
        parts.push(box);
      });
    }
    detail.replaceChildren(...parts);
    detail.scrollTop = 0;
  };

  theme.onChange(() => { if (index) showDetail(); });
  unpack(source.textContent).then((value) => {
    index = value;
    startFilters();
    select();
    document.documentElement.dataset.opened = String(Math.round(performance.now()));
  });
})();
