// Gives the charts to ECharts: each is drawn once it comes near the screen.
(() => {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const drawn = new Map();
  const COLORS = 8;

  const number = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  };

  const tick = (value) => {
    const size = Math.abs(value);
    if (size >= 1e9) return `${value / 1e9}B`;
    if (size >= 1e6) return `${value / 1e6}M`;
    if (size >= 1e4) return `${value / 1e3}k`;
    if (size !== 0 && size < 1e-3) return Number(value.toPrecision(3)).toExponential();
    return String(Number(value.toPrecision(6)));
  };

  const bandSeries = (line, color) => {
    const shared = {
      type: "line", stack: `band ${line.title}`, stackStrategy: "all", symbol: "none", silent: true, animation: false,
      lineStyle: { opacity: 0 }, emphasis: { disabled: true }, tooltip: { show: false }, color, z: 1,
    };
    const rows = line.band.rows.filter((row) => row[1] !== null && row[2] !== null);
    return [
      { ...shared, name: `${line.title} low`, data: rows.map(([x, low]) => [x, low]) },
      {
        ...shared, name: `${line.title} high`, data: rows.map(([x, low, high]) => [x, high - low]),
        areaStyle: { color, opacity: 0.18 },
      },
    ];
  };

  const lineSeries = (line, color, stacked) => ({
    type: "line", name: line.title, data: line.points, color, z: 3, animation: false, connectNulls: false,
    // Few points are seen only with their marks.
    symbol: "circle", symbolSize: 5, showSymbol: line.points.length <= 25 && !stacked,
    lineStyle: { width: stacked ? 0.5 : 1.8, type: line.dashed ? "dashed" : "solid" },
    ...(stacked ? { stack: "all", areaStyle: { opacity: 0.75 }, symbol: "none" } : {}),
  });

  const words = (spec, items) => {
    const shown = items.filter((item) => spec.lines.some((line) => line.title === item.seriesName));
    if (!shown.length) return "";
    const at = shown[0].value[0];
    const rows = shown.map((item) => {
      const line = spec.lines.find((each) => each.title === item.seriesName);
      const range = line.band?.rows.find((row) => row[0] === at);
      const band = range ? `  (${number(range[1])} to ${number(range[2])}, ${line.band.title})` : "";
      return `${item.marker} ${line.title}: ${number(item.value[1])}${band}`;
    });
    return [`${spec.x} ${at}`, ...rows].join("\n");
  };

  const option = (spec, width) => {
    const color = (place) => theme.color(`--c${place % COLORS}`);
    const text = theme.color("--dim"), grid = theme.color("--line");
    const several = spec.lines.length > 1;
    // A legend of several rows needs room; letters are about 6.5 pixels wide.
    const letters = spec.lines.reduce((sum, line) => sum + 6.5 * line.title.length + 30, 0);
    const legendHeight = several ? 6 + 20 * Math.ceil(letters / Math.max(width - 20, 100)) : 0;
    // Points of a stack lie above each other only where every line has one.
    const steps = [...new Set(spec.lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    const filled = (line) => {
      const known = new Map(line.points);
      return { ...line, points: steps.map((step) => [step, known.get(step) ?? 0]) };
    };
    const single = steps.length === 1;
    const lines = spec.stacked ? spec.lines.map(filled) : spec.lines;
    return {
      backgroundColor: "transparent",
      textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
      grid: { left: 8, right: 14, top: 14, bottom: 26 + legendHeight, containLabel: true },
      legend: several
        ? { type: "plain", bottom: 0, left: 0, icon: "roundRect", itemWidth: 12, itemHeight: 8, data: lines.map((line) => line.title),
            textStyle: { color: text } }
        : { show: false },
      tooltip: {
        trigger: "axis", renderMode: "richText", confine: true, backgroundColor: theme.color("--back"),
        borderColor: grid, textStyle: { color: theme.color("--text"), fontSize: 12 }, formatter: (items) => words(spec, items),
      },
      xAxis: {
        type: "value", min: single ? steps[0] - 1 : "dataMin", max: single ? steps[0] + 1 : "dataMax", minInterval: 1, name: spec.x, nameLocation: "middle", nameGap: 22,
        nameTextStyle: { color: text }, axisLabel: { color: text, formatter: tick, hideOverlap: true },
        axisLine: { onZero: false, lineStyle: { color: grid } }, splitLine: { show: false },
      },
      yAxis: {
        type: "value", scale: !spec.stacked, axisLabel: { color: text, formatter: tick },
        splitLine: { lineStyle: { color: grid, opacity: 0.6 } },
      },
      series: lines.flatMap((line) => {
        const own = color(line.color);
        return [...(line.band ? bandSeries(line, own) : []), lineSeries(line, own, spec.stacked)];
      }),
    };
  };

  const draw = (element, printed) => {
    const spec = specs[element.dataset.chart];
    // Paper has more pixels than a screen.
    const chart = drawn.get(element) ?? echarts.init(element, null, { renderer: "canvas", devicePixelRatio: Math.max(2, devicePixelRatio) });
    drawn.set(element, chart);
    if (printed) chart.resize(printed);
    chart.setOption(option(spec, printed ? printed.width : element.clientWidth), true);
    if (printed) chart.getZr().flush();
  };

  const elements = [...document.querySelectorAll("[data-chart]")];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
    }
  }, { rootMargin: "400px" });
  elements.forEach((element) => seen.observe(element));
  new ResizeObserver(() => drawn.forEach((chart) => chart.resize())).observe(document.querySelector("main"));
  theme.onChange(() => [...drawn.keys()].forEach((element) => draw(element)));
  // Before a page is printed, its elements still have the widths of the screen. Draw all charts at one size that suits
  // half a sheet; the style sheet scales the pictures to their cards.
  const PRINTED = { width: 420, height: 235 };
  addEventListener("beforeprint", () => elements.forEach((element) => draw(element, PRINTED)));
  addEventListener("afterprint", () => drawn.forEach((chart, element) => {
    chart.resize({ width: "auto", height: "auto" });
    draw(element);
  }));
})();
