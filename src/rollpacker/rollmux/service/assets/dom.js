// Elements that are made once and then changed only where what they show has changed.

export const at = (id) => document.getElementById(id);

export function make(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

const shown = new WeakMap();

// Whether an element shows something else than `what`; from now on it is said to show that.
export function differs(element, what) {
  const sign = JSON.stringify(what);
  if (shown.get(element) === sign) return false;
  shown.set(element, sign);
  return true;
}

// A part is text or {text, href, className, title, dot}; all of it may come from strangers, so
// nothing of it is ever read as HTML.
function node(part) {
  if (typeof part !== "object") return document.createTextNode(part);
  const element = make(part.href ? "a" : "span", part.text, part.className);
  if (part.href) element.href = part.href;
  if (part.title) element.title = part.title;
  if (!part.dot) return element;
  const both = make("span", null, "job");
  const dot = make("span", null, "dot");
  dot.style.background = part.dot;
  both.append(dot, element);
  return both;
}

export function fill(element, parts) {
  if (!differs(element, parts)) return;
  const plain = parts.length === 1 && typeof parts[0] !== "object";
  const only = element.childNodes.length === 1 ? element.firstChild : null;
  if (plain && only instanceof Text) only.data = parts[0];
  else element.replaceChildren(...parts.map(node));
}

const lists = new WeakMap();

// One element for each item, in their order; `update` is called for each.
export function keyed(place, items, key, create, update) {
  const known = lists.get(place) ?? new Map();
  if (!lists.has(place)) place.replaceChildren();
  lists.set(place, known);
  const wanted = new Set(items.map(key));
  for (const [name, element] of known) {
    if (wanted.has(name)) continue;
    element.remove();
    known.delete(name);
  }
  let next = place.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let element = known.get(name);
    if (!element) known.set(name, (element = create(item)));
    if (element === next) next = next.nextElementSibling;
    else place.insertBefore(element, next);
    update(element, item);
  }
}

function asParts(cell) {
  if (Array.isArray(cell)) return cell;
  return [typeof cell === "object" ? cell : String(cell)];
}

// Rows of a table body; `cells` gives a row's cells: text, a part or a list of parts.
export function rows(body, items, key, cells, empty) {
  const nothing = { empty };
  const all = items.length ? items : [nothing];
  const named = (item) => (item === nothing ? "" : `=${key(item)}`);
  keyed(body, all, named, () => make("tr"), (row, item) => {
    const found = item === nothing ? [{ text: empty, className: "none" }] : cells(item);
    while (row.cells.length < found.length) row.append(make("td"));
    if (item === nothing) row.cells[0].colSpan = 12;
    found.forEach((cell, index) => fill(row.cells[index], asParts(cell)));
  });
}

// Numbers with their names: [name, value, className].
export function tiles(place, found) {
  const create = () => {
    const tile = make("div", null, "tile");
    tile.append(make("b"), make("span"));
    return tile;
  };
  keyed(place, found, ([name]) => name, create, (tile, [name, value, className]) => {
    if (!differs(tile, [name, value, className])) return;
    tile.firstChild.textContent = value;
    tile.firstChild.className = className || "";
    tile.lastChild.textContent = name;
  });
}

// A bar of parts, each {share of 1, className or colour, title}; `mark` is a line at a share.
export function bar(place, parts, mark) {
  if (!differs(place, [parts, mark])) return;
  place.replaceChildren(...parts.map((part) => {
    const piece = make("i", null, part.className);
    piece.style.width = `${Math.min(100 * part.share, 100)}%`;
    if (part.colour) piece.style.background = part.colour;
    piece.title = part.title;
    return piece;
  }));
  if (mark === undefined) return;
  const line = make("u");
  line.style.left = `${Math.min(100 * mark, 100)}%`;
  place.append(line);
}
