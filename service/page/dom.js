// Makes elements. Text is always text: nothing here or elsewhere parses HTML.

/** `h("p", {className: "dim", "aria-label": "x"}, "text", child)` */
export function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.includes("-") || key === "role") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Text for screen readers alone. */
export const unseen = (text) => h("span", { className: "hidden" }, text);
