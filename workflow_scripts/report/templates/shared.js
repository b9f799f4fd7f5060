"use strict";
// What the pages' scripts share: elements, numbers, colours, and the map of heads.
const shared = (() => {
  // ColorBrewer's RdBu from blue (-1) over white (0) to red (1), as in the figures.
  const RDBU = [[5, 48, 97], [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240], [247, 247, 247],
    [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43], [103, 0, 31]];

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

  const channels = (value, limit) => {
    const place = (Math.max(-1, Math.min(1, limit ? value / limit : 0)) + 1) * (RDBU.length - 1) / 2;
    const below = Math.min(Math.floor(place), RDBU.length - 2);
    return [0, 1, 2].map((c) => Math.round(RDBU[below][c] + (place - below) * (RDBU[below + 1][c] - RDBU[below][c])));
  };
  const colour = (value, limit) => `rgb(${channels(value, limit).join(", ")})`;
  // Black or white, whichever reads on the colour.
  const ink = (value, limit) => {
    const [red, green, blue] = channels(value, limit);
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000000" : "#ffffff";
  };

  // Fill a table with a row a head and a column a layer. `choose(index)` hears of the cell that is pointed at or
  // focused; index counts by layer and head. Returns the cells in that order, and `mark(index)`, which chooses one.
  const headMap = (map, layers, rows, choose) => {
    const cells = [];
    let chosen = null;
    const mark = (index) => {
      if (chosen !== null) {
        cells[chosen].classList.remove("chosen");
        cells[chosen].tabIndex = -1;
      }
      chosen = index;
      cells[index].classList.add("chosen");
      cells[index].tabIndex = 0;
      choose(index);
    };
    // On a phone too all layers shall be in view; 32 for the page's margins, 32 for the names of heads, 1 between cells.
    const room = Math.min(680, document.documentElement.clientWidth - 32) - 32;
    map.style.setProperty("--cell", `${Math.max(8, Math.min(26, Math.floor(room / layers) - 1))}px`);
    const label = (n, every) => (n % every ? "" : String(n));
    const heading = element("tr", {}, [element("th", { ariaLabel: "head" })]);
    for (let layer = 0; layer < layers; layer += 1) {
      const textContent = label(layer, layers > 40 ? 10 : 5);
      heading.append(element("th", { scope: "col", ariaLabel: `layer ${layer}`, textContent }));
    }
    const body = element("tbody");
    for (let head = 0; head < rows; head += 1) {
      const textContent = label(head, rows > 20 ? 4 : 1);
      const row = element("tr", {}, [element("th", { scope: "row", ariaLabel: `head ${head}`, textContent })]);
      for (let layer = 0; layer < layers; layer += 1) {
        const index = layer * rows + head;
        const cell = element("td", { tabIndex: -1 });
        cell.setAttribute("role", "gridcell");
        cell.dataset.head = `${layer}-${head}`;
        for (const event of ["mouseenter", "click", "focus"]) cell.addEventListener(event, () => mark(index));
        cells[index] = cell;
        row.append(cell);
      }
      body.append(row);
    }
    map.append(element("thead", {}, [heading]), body);
    map.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (chosen === null || !(event.key in steps || ["Home", "End"].includes(event.key))) return;
      event.preventDefault();
      let [layer, head] = [Math.floor(chosen / rows), chosen % rows];
      if (event.key === "Home") layer = 0;
      else if (event.key === "End") layer = layers - 1;
      else {
        layer = Math.max(0, Math.min(layers - 1, layer + steps[event.key][0]));
        head = Math.max(0, Math.min(rows - 1, head + steps[event.key][1]));
      }
      cells[layer * rows + head].focus();
    });
    return { cells, mark };
  };

  return { element, number, colour, ink, headMap };
})();
