(() => {
  "use strict";
  const DATA = JSON.parse(document.getElementById("data").textContent).browsers;
  const PAGE = 12;
  const STEP = 0, ID = 1, INDEX = 2, REWARD = 3, TOKENS = 4, STATE = 5, FINISH = 6, REWARDS = 7,
    PLACES = 8, PROMPT = 9, TEXT = 10, TURNS = 11, MESSAGES = 12;
  const ROLE = 0, NAME = 1, TURN = 2, CONTENT = 3, CALLS = 4, ERRORS = 5;
  const ROLES = ["system", "user", "assistant", "tool"];

  // What a model wrote gets into the page as text only, never as markup.
  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function choice(label, options, chosen) {
    const select = element("select");
    select.setAttribute("aria-label", label);
    for (const [value, text] of options) {
      const option = element("option", "", text);
      option.value = value;
      option.selected = value === chosen;
      select.append(option);
    }
    return select;
  }

  // All that a search looks at.
  function texts(row) {
    if (!row[MESSAGES]) return [row[TEXT]];
    return row[MESSAGES].flatMap((m) => [m[NAME], m[CONTENT], ...m[CALLS].flat(), ...m[ERRORS]]);
  }

  function marked(text, wanted, tag = "pre") {
    const block = element(tag);
    if (!wanted) {
      block.textContent = text;
      return block;
    }
    const low = text.toLowerCase();
    let at = 0;
    // Lower case may have another length; then nothing is marked rather than the wrong place.
    for (let next = low.indexOf(wanted); next >= 0 && low.length === text.length;
      next = low.indexOf(wanted, at)) {
      block.append(text.slice(at, next), element("mark", "", text.slice(next, next + wanted.length)));
      at = next + wanted.length;
    }
    block.append(text.slice(at));
    return block;
  }

  const plain = (value) => (value === null ? "–" : String(Math.round(value * 1e4) / 1e4));

  function said(message, wanted) {
    const role = ROLES.includes(message[ROLE]) ? " " + message[ROLE] : "";
    const made = element("div", "said" + role), about = element("div", "about");
    about.append(element("b", "", message[ROLE]));
    if (message[NAME]) about.append(marked(message[NAME], wanted, "span"));
    if (message[TURN]) about.append(element("span", "", message[TURN]));
    made.append(about);
    if (message[CONTENT]) made.append(marked(message[CONTENT], wanted));
    for (const [name, given] of message[CALLS]) {
      const call = element("div", "call");
      call.append("calls ", marked(name, wanted, "code"), marked(given, wanted));
      made.append(call);
    }
    for (const error of message[ERRORS]) {
      const bad = element("div", "call");
      bad.append("a call that was not understood: ", marked(error, wanted, "span"));
      made.append(bad);
    }
    return made;
  }

  function card(row, data, wanted) {
    const made = element("div", "response"), about = element("div", "about");
    about.append(element("b", "", `reward ${plain(row[REWARD])}`));
    if (data.rewards.length > 1) {
      data.rewards.forEach((name, i) =>
        about.append(element("span", "", `${name} ${plain(row[REWARDS][i])}`)));
    }
    const cutOff = row[FINISH] === "length" ? ", cut off" : "";
    for (const text of [`step ${row[STEP]}`, `prompt ${row[ID]}, response ${row[INDEX]}`,
      `${row[TOKENS]} tokens${cutOff}`, ...(row[TURNS] ? [row[TURNS]] : []), row[STATE]]) about.append(element("span", "", text));
    const prompt = element("details");
    prompt.append(element("summary", "", "prompt"), element("pre", "", data.prompts[row[PROMPT]]));
    made.append(about, prompt);
    if (row[MESSAGES]) made.append(...row[MESSAGES].map((message) => said(message, wanted)));
    else made.append(marked(row[TEXT], wanted));
    return made;
  }

  const ORDERS = {
    best: (a, b) => (b[REWARD] ?? -Infinity) - (a[REWARD] ?? -Infinity),
    worst: (a, b) => (a[REWARD] ?? Infinity) - (b[REWARD] ?? Infinity),
    longest: (a, b) => b[TOKENS] - a[TOKENS],
    random: (a, b) => a[PLACES][3] - b[PLACES][3],
  };

  function setUp(root, data) {
    const steps = [...new Set(data.rows.map((row) => row[STEP]))].sort((a, b) => a - b);
    const step = choice("step of the responses",
      [["all", "all steps"], ...steps.map((s) => [String(s), `step ${s}`])],
      String(steps[steps.length - 1]));
    const kind = choice("order of the responses",
      [...data.kinds.map((name) => [name, name]), ["all", "all that are here"]], "best");
    const search = element("input"), note = element("span", "chip");
    search.type = "search";
    search.placeholder = "search in the responses";
    search.setAttribute("aria-label", "search in the responses");
    const controls = element("div", "controls"), list = element("div");
    const more = element("button", "", "show more");
    more.type = "button";
    controls.append(step, kind, search, note);
    root.append(controls, list, more);

    let shown = PAGE;
    function draw() {
      const wanted = search.value.toLowerCase(), place = data.kinds.indexOf(kind.value);
      const fits = (row) =>
        !wanted || texts(row).some((text) => text.toLowerCase().includes(wanted));
      const here = data.rows.filter((row) => step.value === "all" || String(row[STEP]) === step.value);
      // A search looks through all that are here, whichever list they are of.
      const rows = here.filter((row) =>
        fits(row) && (wanted || place < 0 || row[PLACES][place] !== null));
      const order = ORDERS[kind.value];
      if (order) rows.sort((a, b) => order(a, b) || a[STEP] - b[STEP]);
      list.replaceChildren(...rows.slice(0, shown).map((row) => card(row, data, wanted)));
      more.hidden = rows.length <= shown;
      const elsewhere = wanted && step.value !== "all"
        ? `, ${data.rows.filter(fits).length} in all steps` : "";
      note.textContent = `${rows.length} of ${here.length} responses${elsewhere}`;
    }
    function again() {
      shown = PAGE;
      draw();
    }
    step.addEventListener("change", again);
    kind.addEventListener("change", again);
    search.addEventListener("input", again);
    more.addEventListener("click", () => {
      shown += PAGE;
      draw();
    });
    draw();
  }

  for (const root of document.querySelectorAll("[data-browser]")) {
    setUp(root, DATA[root.dataset.browser]);
  }
})();
