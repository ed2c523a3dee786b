"use strict";
(() => {
  const { texts, rows, marks, ok } = JSON.parse(document.getElementById("data").textContent);
  const FIELDS = ["subject", "profile", "name", "clauses", "ids", "dtype", "layout", "way", "verdict", "detail"];
  const WEIGHT = ["crashed", "failed", "wrongly-accepted", "waived", "passed", "refused", "not-applicable"];
  const STEP = 200;
  const find = (id) => document.getElementById(id);
  const good = new Set(ok);
  let open = null, chosen = [], shown = 0;

  const size = (ratio) => (typeof ratio === "number" ? ratio : Infinity);
  const said = (ratio) => (typeof ratio === "number" ? String(Number(ratio.toPrecision(3))) : "∞");

  const trials = rows.map((row) => {
    const trial = {};
    FIELDS.forEach((field, i) => { trial[field] = texts[row[i]]; });
    [trial.ratios, trial.seconds, trial.command] = row.slice(FIELDS.length);
    const kinds = Object.keys(trial.ratios);
    trial.kind = kinds.reduce((a, b) => (a && size(trial.ratios[a]) >= size(trial.ratios[b]) ? a : b), "");
    trial.worst = trial.kind ? size(trial.ratios[trial.kind]) : -1;
    return trial;
  });

  // Text only ever enters the page as text.
  const make = (tag, props, ...inside) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...inside);
    return node;
  };

  const ORDERS = {
    run: (a, b) => WEIGHT.indexOf(a.verdict) - WEIGHT.indexOf(b.verdict),
    ratio: (a, b) => b.worst - a.worst,
    seconds: (a, b) => b.seconds - a.seconds,
    name: (a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0),
  };

  const matches = (trial, words, verdict) => {
    if (verdict === "against" ? good.has(trial.verdict) : verdict && trial.verdict !== verdict) return false;
    const text = FIELDS.slice(2).map((field) => trial[field]).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };

  const lastLine = (text) => text.trim().split("\n").pop().slice(0, 400);

  const inner = (trial) => {
    const cell = make("td", { colSpan: 8 });
    if (trial.detail) cell.append(make("pre", { textContent: trial.detail }));
    const kinds = Object.keys(trial.ratios);
    if (kinds.length) {
      const each = kinds.map((kind) => `${kind} ${said(trial.ratios[kind])}`).join(", ");
      cell.append(make("p", { className: "hint", textContent: `Error / bound: ${each}` }));
    }
    if (trial.ids) cell.append(make("p", { className: "hint", textContent: `Known faults it would catch: ${trial.ids}` }));
    cell.append(make("span", { className: "command" },
      make("code", { textContent: trial.command }),
      make("button", { type: "button", className: "copy", textContent: "Copy" })));
    return make("tr", { className: "inner" }, cell);
  };

  const line = (trial) => {
    const name = make("button", { type: "button", className: "name", textContent: trial.name });
    name.setAttribute("aria-expanded", "false");
    const first = make("td", {}, name);
    const bad = !good.has(trial.verdict);
    if (bad) first.append(make("span", { className: "said", textContent: lastLine(trial.detail) }));
    const row = make("tr", { className: bad ? "against" : "" }, first,
      make("td", { textContent: trial.clauses }), make("td", { textContent: trial.dtype }),
      make("td", { textContent: trial.layout }), make("td", { textContent: trial.way || "none" }),
      make("td", { className: "verdict", textContent: `${marks[trial.verdict] || ""} ${trial.verdict}` }),
      make("td", { className: "number", textContent: trial.kind ? `${said(trial.ratios[trial.kind])} ${trial.kind}` : "" }),
      make("td", { className: "number", textContent: trial.seconds.toFixed(2) }));
    name.addEventListener("click", () => {
      const was = name.getAttribute("aria-expanded") === "true";
      name.setAttribute("aria-expanded", String(!was));
      if (was) row.nextElementSibling.remove(); else row.after(inner(trial));
    });
    return row;
  };

  const more = () => {
    const next = chosen.slice(shown, shown + STEP);
    shown += next.length;
    find("rows").append(...next.map(line));
    const left = chosen.length - shown;
    find("more").hidden = left === 0;
    find("more").textContent = `Show ${Math.min(left, STEP)} more of ${left}`;
  };

  const list = () => {
    const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdict = find("verdict").value;
    const all = trials.filter((t) => t.subject === open.dataset.subject && t.profile === open.dataset.profile);
    chosen = all.filter((trial) => matches(trial, words, verdict)).sort(ORDERS[find("order").value]);
    shown = 0;
    find("rows").replaceChildren();
    more();
    find("shown").textContent = `${chosen.length} of ${all.length} trials`;
  };

  const close = () => {
    if (!open) return;
    open.setAttribute("aria-expanded", "false");
    find("cases").hidden = true;
    open = null;
  };

  const show = (cell) => {
    const same = cell === open;
    close();
    if (same) return;
    open = cell;
    cell.setAttribute("aria-expanded", "true");
    find("cases-title").textContent = `${cell.dataset.subject}, ${cell.dataset.profile}`;
    find("cases").hidden = false;
    list();
    find("cases-title").focus({ preventScroll: true });
    find("cases").scrollIntoView({ block: "nearest" });
  };

  const byHand = (text) => {
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };

  const copy = async (button) => {
    const text = button.parentElement.querySelector("code").textContent;
    let done = true;
    try { await navigator.clipboard.writeText(text); } catch { done = byHand(text); }
    button.textContent = done ? "Copied" : "Select it by hand";
    find("said").textContent = done ? `Copied: ${text}` : "Copying was not allowed";
    button.focus();
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  };

  document.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) show(cell);
    const button = event.target.closest(".copy");
    if (button) copy(button);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !open) return;
    const cell = open;
    close();
    cell.focus();
  });
  find("close").addEventListener("click", () => { const cell = open; close(); cell.focus(); });
  find("more").addEventListener("click", more);
  find("filter").addEventListener("input", list);
  find("verdict").addEventListener("change", list);
  find("order").addEventListener("change", list);
})();
