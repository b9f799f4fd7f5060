"use strict";
(() => {
  const { element, number, colour, headMap } = shared;
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const names = Object.keys(data.scores);
  const SHOWN = 20;
  const state = { score: data.main, sort: "value", descending: true, all: false };

  const nameOf = (index) => `${data.heads[index][0]}-${data.heads[index][1]}`;
  const interval = ([, low, high]) => `[${number(low)}, ${number(high)}]`;

  const detail = (index) => {
    const [layer, head, group] = data.heads[index];
    const lines = names.map((name) => {
      const row = data.scores[name].rows[index];
      return element("tr", {}, [
        element("th", { scope: "row", textContent: name }),
        element("td", { className: "number", textContent: number(row[0]) }),
        element("td", { className: "interval", textContent: interval(row) }),
        element("td", { className: "number", textContent: `${row[3]} of ${data.heads.length}` }),
      ]);
    });
    const headings = ["score", "value", "95 % interval", "rank"];
    byId("detail").replaceChildren(
      element("h3", { textContent: `Layer ${layer}, head ${head}` }),
      element("p", { textContent: `KV group ${group} of this layer` }),
      element("table", {}, [
        element("thead", {}, [element("tr", {}, headings.map((text) => element("th", { scope: "col", textContent: text })))]),
        element("tbody", {}, lines),
      ]),
    );
  };
  const countOf = (part) => 1 + Math.max(...data.heads.map((head) => head[part]));
  const map = headMap(byId("map"), countOf(0), countOf(1), detail);

  const paint = () => {
    const score = data.scores[state.score];
    score.rows.forEach((row, index) => {
      map.cells[index].style.backgroundColor = colour(row[0], score.limit);
      map.cells[index].classList.toggle("best", row[3] <= data.top);
      map.cells[index].ariaLabel = `layer ${data.heads[index][0]}, head ${data.heads[index][1]}: ${state.score} ` +
        `${number(row[0])}, rank ${row[3]}`;
    });
    byId("unit").textContent = score.unit && `in ${score.unit}`;
    byId("limit").textContent = number(score.limit);
    byId("ranking-score").textContent = state.score;
  };

  // The table: what a column shows and sorts by.
  const columns = () => [
    { key: "head", title: "head", value: (i) => i, text: nameOf },
    { key: "group", title: "KV group", value: (i) => data.heads[i][2], text: (i) => data.heads[i][2] },
    { key: "value", title: state.score, value: (i) => data.scores[state.score].rows[i][0],
      text: (i) => number(data.scores[state.score].rows[i][0]) },
    { key: "interval", title: "95 % interval", value: (i) => data.scores[state.score].rows[i][1],
      text: (i) => interval(data.scores[state.score].rows[i]) },
    ...names.map((name) => ({ key: `rank ${name}`, title: `rank: ${name}`,
      value: (i) => data.scores[name].rows[i][3], text: (i) => data.scores[name].rows[i][3] })),
  ];

  const list = () => {
    const shown = columns();
    const sorted = shown.find((column) => column.key === state.sort);
    const order = data.heads.map((_, index) => index).sort((a, b) =>
      (sorted.value(a) - sorted.value(b)) * (state.descending ? -1 : 1) || a - b);
    const table = byId("ranking");
    const focused = document.activeElement?.dataset?.key;
    table.tHead.replaceChildren(element("tr", {}, shown.map((column) => {
      const button = element("button", { type: "button", textContent: column.title });
      button.dataset.key = column.key;
      button.addEventListener("click", () => {
        // Values start with the largest, names and ranks with the smallest.
        const first = ["value", "interval"].includes(column.key);
        state.descending = state.sort === column.key ? !state.descending : first;
        state.sort = column.key;
        list();
      });
      const heading = element("th", { scope: "col", className: "number" }, [button]);
      if (column === sorted) {
        heading.ariaSort = state.descending ? "descending" : "ascending";
        button.append(state.descending ? " \u25be" : " \u25b4");
      }
      return heading;
    })));
    table.tBodies[0].replaceChildren(...order.slice(0, state.all ? undefined : SHOWN).map((index) =>
      element("tr", {}, shown.map((column) =>
        element("td", { className: "number", textContent: column.text(index) })))));
    if (focused) table.tHead.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    byId("more").hidden = data.heads.length <= SHOWN;
    byId("more").textContent = state.all ? `Show ${SHOWN} heads` : `Show all ${data.heads.length} heads`;
  };

  byId("score").append(...names.map((name) => element("option", { value: name, textContent: name })));
  byId("score").value = state.score;
  byId("score").addEventListener("change", (event) => {
    state.score = event.target.value;
    paint();
    list();
  });
  byId("more").addEventListener("click", () => {
    state.all = !state.all;
    list();
  });
  paint();
  list();
  map.mark(data.scores[state.score].rows.findIndex((row) => row[3] === 1));
})();
