"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const names = Object.keys(data.scores);
  const SHOWN = 20;
  // ColorBrewer's RdBu from blue (-1) over white (0) to red (1), as in the figures.
  const RDBU = [[5, 48, 97], [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240], [247, 247, 247],
    [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43], [103, 0, 31]];
  const state = { score: data.main, sort: "value", descending: true, all: false, chosen: null };

  const element = (tag, properties = {}, children = []) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const number = (value) => {
    const size = Math.abs(value);
    const digits = size >= 100 ? value.toFixed(0) : size >= 0.001 ? value.toPrecision(3) : value.toExponential(1);
    return (value === 0 ? "0" : digits).replaceAll("-", "\u2212");
  };
  const nameOf = (index) => `${data.heads[index][0]}-${data.heads[index][1]}`;
  const interval = ([, low, high]) => `[${number(low)}, ${number(high)}]`;

  const colour = (value, limit) => {
    const place = (Math.max(-1, Math.min(1, value / limit)) + 1) * (RDBU.length - 1) / 2;
    const below = Math.min(Math.floor(place), RDBU.length - 2);
    const channel = (c) => Math.round(RDBU[below][c] + (place - below) * (RDBU[below + 1][c] - RDBU[below][c]));
    return `rgb(${channel(0)}, ${channel(1)}, ${channel(2)})`;
  };

  // The map: a row a head, a column a layer.
  const layers = 1 + Math.max(...data.heads.map((head) => head[0]));
  const rows = 1 + Math.max(...data.heads.map((head) => head[1]));
  const cells = [];
  const at = (layer, head) => cells[layer * rows + head];

  const buildMap = () => {
    const map = byId("map");
    map.style.setProperty("--cell", `${Math.max(12, Math.min(26, Math.floor(640 / layers)))}px`);
    const label = (n, every) => (n % every ? "" : String(n));
    const step = layers > 40 ? 10 : 5;
    const heading = element("tr", {}, [element("th", { ariaLabel: "head" })]);
    for (let layer = 0; layer < layers; layer += 1) {
      heading.append(element("th", { scope: "col", ariaLabel: `layer ${layer}`, textContent: label(layer, step) }));
    }
    map.append(element("thead", {}, [heading]));
    const body = element("tbody");
    for (let head = 0; head < rows; head += 1) {
      const row = element("tr", {}, [
        element("th", { scope: "row", ariaLabel: `head ${head}`, textContent: label(head, rows > 20 ? 4 : 1) }),
      ]);
      for (let layer = 0; layer < layers; layer += 1) {
        const index = layer * rows + head;
        const cell = element("td", { tabIndex: -1 });
        cell.setAttribute("role", "gridcell");
        cell.dataset.head = nameOf(index);
        cell.addEventListener("mouseenter", () => choose(index));
        cell.addEventListener("click", () => choose(index));
        cell.addEventListener("focus", () => choose(index));
        cells[index] = cell;
        row.append(cell);
      }
      body.append(row);
    }
    map.append(body);
    map.addEventListener("keydown", move);
  };

  const move = (event) => {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (state.chosen === null || !(event.key in steps || ["Home", "End"].includes(event.key))) return;
    event.preventDefault();
    let [layer, head] = data.heads[state.chosen];
    if (event.key === "Home") layer = 0;
    else if (event.key === "End") layer = layers - 1;
    else {
      layer = Math.max(0, Math.min(layers - 1, layer + steps[event.key][0]));
      head = Math.max(0, Math.min(rows - 1, head + steps[event.key][1]));
    }
    at(layer, head).focus();
  };

  const choose = (index) => {
    if (state.chosen !== null) {
      cells[state.chosen].classList.remove("chosen");
      cells[state.chosen].tabIndex = -1;
    }
    state.chosen = index;
    cells[index].classList.add("chosen");
    cells[index].tabIndex = 0;
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

  const paint = () => {
    const score = data.scores[state.score];
    score.rows.forEach((row, index) => {
      cells[index].style.backgroundColor = colour(row[0], score.limit);
      cells[index].classList.toggle("best", row[3] <= data.top);
      cells[index].ariaLabel = `layer ${data.heads[index][0]}, head ${data.heads[index][1]}: ${state.score} ` +
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
  buildMap();
  paint();
  list();
  choose(data.scores[state.score].rows.findIndex((row) => row[3] === 1));
})();
