"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const plots = [...document.querySelectorAll(".plot")];

  function look(printed) {
    const night = dark.matches && !printed;
    const narrow = innerWidth < 600;
    const ink = night ? "#e8e8ec" : "#1b1b1f";
    const rule = night ? "#43464e" : "#d5d8de";
    const changes = {
      "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
      "font.color": ink, "font.size": narrow ? 11 : 13, "font.family": getComputedStyle(document.body).fontFamily,
    };
    for (const axis of ["xaxis", "yaxis"]) {
      changes[axis + ".gridcolor"] = rule;
      changes[axis + ".zerolinecolor"] = rule;
      changes[axis + ".linecolor"] = ink;
    }
    changes["xaxis.nticks"] = narrow ? 4 : 10;
    return changes;
  }

  // On a narrow page a legend has a line an entry: the chart grows by what goes beyond three.
  function room(chart) {
    const named = [...chart.traces, ...(chart.layout.shapes || []).filter((each) => each.showlegend)];
    const entries = named.filter((each) => each.showlegend !== false).length;
    return chart.layout.height + (innerWidth < 600 ? 17 * Math.max(0, entries - 3) : 0);
  }

  const chartOf = (plot) => charts[Number(plot.dataset.chart)];
  const size = (plot) => ({ width: plot.clientWidth, height: room(chartOf(plot)) });

  async function draw(plot) {
    const chart = chartOf(plot);
    const layout = { ...chart.layout, ...size(plot) };
    await Plotly.newPlot(plot, chart.traces, layout, { displayModeBar: false, scrollZoom: false });
    await Plotly.relayout(plot, look(false));
    plot.dataset.drawn = "yes";
  }

  async function drawAll() {
    for (const plot of plots) await draw(plot);
    fit();
    document.documentElement.dataset.drawn = "yes";
  }

  const drawn = () => plots.filter((plot) => plot.dataset.drawn);

  dark.addEventListener("change", () => drawn().forEach((plot) => Plotly.relayout(plot, look(false))));
  // Plotly's own way to follow the page's width forgets the height, and lets a chart reach into what is below it.
  function fit() {
    for (const plot of plots) {
      if (plot.dataset.drawn && plot.clientWidth && plot.clientWidth !== plot.layout.width) Plotly.relayout(plot, { ...look(false), ...size(plot) });
    }
  }
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(fit, 150);
  });
  addEventListener("beforeprint", () => drawn().forEach((plot) => Plotly.relayout(plot, { ...look(true), width: 660 })));
  addEventListener("afterprint", () => drawn().forEach((plot) => Plotly.relayout(plot, { ...look(false), ...size(plot) })));

  function sortBy(table, column, heading) {
    const descending = heading.getAttribute("aria-sort") === "ascending";
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => {
      const cell = row.cells[column];
      return { row, figure: cell.dataset.value === undefined ? NaN : Number(cell.dataset.value), text: cell.textContent.trim() };
    });
    const figures = rows.some((each) => !Number.isNaN(each.figure));
    const empty = (each) => (figures ? Number.isNaN(each.figure) : each.text === "-" || each.text === "");
    const order = (a, b) => (figures ? a.figure - b.figure : a.text.localeCompare(b.text, document.documentElement.lang, { numeric: true }));
    rows.sort((a, b) => empty(a) - empty(b) || (empty(a) ? 0 : descending ? order(b, a) : order(a, b)));
    body.append(...rows.map((each) => each.row));
    for (const each of table.tHead.rows[0].cells) each.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const status = document.getElementById("status");
    status.textContent = status.dataset[heading.getAttribute("aria-sort")].replace("{0}", () => heading.textContent.trim());
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      button.addEventListener("click", () => sortBy(table, column, heading));
      heading.append(button);
      heading.setAttribute("aria-sort", "none");
    });
  }

  async function copy(pre, button) {
    const status = document.getElementById("status");
    try {
      await navigator.clipboard.writeText(pre.textContent);
    } catch {
      getSelection().selectAllChildren(pre);
      if (!document.execCommand("copy")) return;
    }
    button.textContent = status.textContent = status.dataset.done;
    setTimeout(() => { button.textContent = status.dataset.copy; }, 2000);
  }

  for (const pre of document.querySelectorAll("pre.copied")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = document.getElementById("status").dataset.copy;
    button.addEventListener("click", () => copy(pre, button));
    pre.before(button);
  }

  function unfold() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") {
      for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
      target.scrollIntoView();
    }
  }
  addEventListener("hashchange", unfold);
  document.addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest('a[href^="#trial-"]');
    if (link && link.getAttribute("href") === location.hash) unfold();
  });
  unfold();
  drawAll();
})();
