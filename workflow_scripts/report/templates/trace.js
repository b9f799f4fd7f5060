"use strict";
(() => {
  const { element, number, colour, ink, headMap } = shared;
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  // `step` null means all answer tokens together; `heads` are indices into data.chosen.
  const state = { step: null, heads: data.top, head: null };

  const sum = (lists) => lists[0].map((_, i) => lists.reduce((total, list) => total + (list[i] ?? 0), 0));
  const steps = () => (state.step === null ? data.answer.map((_, step) => step) : [state.step]);
  // Later steps see more positions; the first list must be the longest.
  const tokenValues = () => sum(steps().toReversed().flatMap((step) => state.heads.map((h) => data.phi[step][h])));
  const headValues = (of) => sum(steps().map((step) => data[of][step]));
  const limitOf = (values) => Math.max(...values.map(Math.abs)) || 1;

  // The document: a span a token.
  const spans = data.sources.map(([text, region], position) => {
    const span = element("span", { textContent: text });
    span.dataset.position = position;
    span.dataset.region = data.regions[region];
    span.addEventListener("mouseenter", () => tell(position));
    return span;
  });
  byId("text").append(...spans);
  let shown = [];
  const tell = (position) => {
    const value = position < shown.length ? number(shown[position]) : "0";
    byId("told").textContent = `${JSON.stringify(data.sources[position][0])} (${spans[position].dataset.region}): ${value} logits`;
  };

  const paint = () => {
    shown = tokenValues();
    const limit = limitOf(shown);
    spans.forEach((span, position) => {
      const value = shown[position] ?? 0;
      const visible = Math.abs(value) > limit / 50;
      span.style.backgroundColor = visible ? colour(value, limit) : "";
      span.style.color = visible ? ink(value, limit) : "";
      span.title = `${number(value)} logits`;
    });
    byId("text-limit").textContent = number(limit);
    byId("text-sum").textContent = number(shown.reduce((a, b) => a + b, 0));
    const best = shown.map((_, position) => position).filter((position) => shown[position] > limit / 100)
      .sort((a, b) => shown[b] - shown[a]).slice(0, 8);
    byId("sources").tBodies[0].replaceChildren(...best.map((position) => element("tr", {}, [
      element("td", { textContent: data.sources[position][0].trim() || JSON.stringify(data.sources[position][0]) }),
      element("td", { className: "number", textContent: position }),
      element("td", { textContent: spans[position].dataset.region }),
      element("td", { className: "number", textContent: number(shown[position]) }),
    ])));
    const written = headValues("document");
    const most = limitOf(written);
    written.forEach((value, index) => {
      map.cells[index].style.backgroundColor = colour(value, most);
      map.cells[index].ariaLabel = `layer ${Math.floor(index / data.n_heads)}, head ${index % data.n_heads}: ` +
        `${number(value)} logits from the document`;
    });
    byId("limit").textContent = number(most);
    if (state.head !== null) detail(state.head);
  };

  const indexOf = (index) => data.chosen.findIndex(([layer, head]) => layer * data.n_heads + head === index);
  const detail = (index) => {
    state.head = index;
    const [layer, head] = [Math.floor(index / data.n_heads), index % data.n_heads];
    const known = indexOf(index);
    const lines = [["from the document", "document"], ["from everywhere", "total"]].map(([name, of]) =>
      element("tr", {}, [element("th", { scope: "row", textContent: name }),
        element("td", { className: "number", textContent: `${number(headValues(of)[index])} logits` })]));
    const more = known < 0 ? "Its source tokens are not kept: it is among neither group of heads above." :
      data.top.includes(known) ? "One of the score's best heads." : "One of the heads that wrote most here.";
    byId("detail").replaceChildren(
      element("h3", { textContent: `Layer ${layer}, head ${head}` }),
      element("table", {}, [element("tbody", {}, lines)]),
      element("p", { className: "legend", textContent: more }),
    );
  };
  const map = headMap(byId("map"), data.n_layers, data.n_heads, detail);
  for (const [layer, head] of data.top.map((h) => data.chosen[h])) map.cells[layer * data.n_heads + head].classList.add("best");

  // Which heads, and which answer token.
  const groups = [["top", data.top, "the score's best heads"], ["writers", data.writers, "others that wrote most here"]];
  byId("heads").append(...groups.filter(([, members]) => members.length).map(([name, members, title]) =>
    element("option", { value: name, textContent: `${title} (${members.length})` })),
  ...data.chosen.map(([layer, head], h) => element("option", { value: h, textContent: `head ${layer}-${head}` })));
  byId("heads").addEventListener("change", ({ target }) => {
    const group = groups.find(([name]) => name === target.value);
    state.heads = group ? group[1] : [Number(target.value)];
    paint();
  });
  const buttons = [null, ...data.answer.keys()].map((step) => {
    const button = element("button", { type: "button", textContent: step === null ? "all" : data.answer[step] });
    button.addEventListener("click", () => {
      state.step = step;
      buttons.forEach((other) => { other.ariaPressed = String(other === button); });
      paint();
    });
    button.ariaPressed = String(step === null);
    return button;
  });
  byId("answer").append(...buttons);

  paint();
  const first = headValues("document");
  map.mark(first.indexOf(Math.max(...first)));
})();
