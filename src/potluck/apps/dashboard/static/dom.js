// Elements from data. Texts become text nodes and never markup; the browser enforces it (trusted types).

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const s = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Set a text only if it differs: what did not change is neither drawn nor read out again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
  }
}

const books = new WeakMap();

/**
 * Keep one child per item, in order. Children of items that stay are updated in place, so that focus
 * and the reader's position survive.
 */
export function keyed(parent, items, { key, create, update }) {
  const before = books.get(parent) ?? new Map();
  const after = new Map();
  for (const item of items) {
    const name = key(item);
    const element = before.get(name) ?? create(item);
    update?.(element, item);
    after.set(name, element);
  }
  for (const [name, element] of before) if (!after.has(name)) element.remove();
  let place = parent.firstChild;
  for (const element of after.values()) {
    if (element === place) place = place.nextSibling;
    else parent.insertBefore(element, place);
  }
  books.set(parent, after);
}
