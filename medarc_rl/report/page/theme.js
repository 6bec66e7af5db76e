"use strict";
// Light or dark: the system's choice, until the button says otherwise.
const theme = (() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  let chosen = null;
  const name = () => chosen ?? (system.matches ? "dark" : "light");
  const apply = () => {
    root.dataset.theme = name();
    listeners.forEach((listener) => listener());
  };
  system.addEventListener("change", apply);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = name() === "dark" ? "light" : "dark";
    apply();
  });
  // Paper is light.
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; listeners.forEach((listener) => listener()); });
  addEventListener("afterprint", apply);
  root.dataset.theme = name();
  return {
    color: (variable) => getComputedStyle(root).getPropertyValue(variable).trim(),
    onChange: (listener) => listeners.push(listener),
  };
})();
