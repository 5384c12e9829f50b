"use strict";
(() => {
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

  for (const table of document.querySelectorAll("#trials table.sortable")) {
    const input = document.createElement("input"), status = document.getElementById("status"), rows = [...table.tBodies[0].rows];
    input.type = "search";
    input.placeholder = status.dataset.filter;
    input.setAttribute("aria-label", status.dataset.filter);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      status.textContent = status.dataset.filtered.replace("{0}", () => rows.filter((row) => !row.hidden).length).replace("{1}", () => rows.length);
    });
    table.closest(".wide").before(input);
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
})();
