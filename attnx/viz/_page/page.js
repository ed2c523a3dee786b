"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const bytes = (text) => {
    const plain = atob(text), made = new Uint8Array(plain.length);
    for (let n = 0; n < made.length; n++) made[n] = plain.charCodeAt(n);
    return made;
  };
  const view = new DataView(bytes(data.weights).buffer);
  const seenBits = bytes(data.visible), emptyBits = bytes(data.empty);
  const bit = (bits, n) => (bits[n >> 3] >> (n & 7)) & 1;
  const R = data.rows[1] - data.rows[0], C = data.columns[1] - data.columns[0];
  const weights = new Float32Array(data.heads.length * R * C);
  for (let n = 0; n < weights.length; n++) weights[n] = view.getFloat32(4 * n, true);

  // matplotlib's cividis, every fifth colour.
  const ANCHORS = "00224d00265500295e002c6700307008337016366f1f3a6e273d6d2e416c34446c39486c3f4b6b444f6b49526b4e566c52596c575d6d5b606e60646e64676f686b716d6e727172737575757979777e7d788380788784788c8878918c77968f779b9376a09775a59b73aa9f72afa370b4a76fb9ab6dbeb06ac4b468c9b865cebc62d4c15ed9c55adfca56e4ce51ead34cefd846f5dc3ffbe136fde737";
  const COLOURS = new Uint8Array(256 * 3);
  for (let n = 0; n < 256; n++) {
    const from = Math.min(50, Math.floor(n / 5)), share = n / 5 - from;
    for (let c = 0; c < 3; c++) {
      const at = (i) => parseInt(ANCHORS.slice(6 * i + 2 * c, 6 * i + 2 * c + 2), 16);
      COLOURS[3 * n + c] = Math.round(at(from) * (1 - share) + at(from + 1) * share);
    }
  }
  const LOWEST = 1e-6;
  const SCALES = {
    linear: (x) => x,
    root: (x) => Math.sqrt(x),
    log: (x) => (x <= LOWEST ? 0 : 1 - Math.log(x) / Math.log(LOWEST)),
  };
  const FONT = "11px system-ui, sans-serif", LABEL = 120, NAMED = 14;
  let head = 0, at = [0, 0], held = false, moved = false;

  const number = (i, j) => (head * R + i) * C + j;
  const said = (x) => (Number.isFinite(x) ? String(Number(x.toPrecision(4))) : String(x).replace("Infinity", "inf"));
  const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

  // Text only ever enters the page as text.
  const make = (tag, props, ...inside) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...inside);
    return node;
  };

  // A token keeps its own direction and leaves that of its position alone.
  const name = (labels, n, start) => [String(n + start), ...(labels ? [make("bdi", { textContent: labels[n] })] : [])];
  const query = (i) => name(data.queries, i, data.rows[0]);
  const key = (j) => name(data.keys, j, data.columns[0]);

  const pattern = (kind) => {
    const tile = make("canvas", { width: kind === "hidden" ? 8 : 4, height: kind === "hidden" ? 8 : 4 });
    const pen = tile.getContext("2d");
    pen.fillStyle = colour(kind === "hidden" ? "--hidden" : "--broken");
    pen.fillRect(0, 0, 8, 8);
    pen.fillStyle = colour(kind === "hidden" ? "--stripe" : "--dot");
    if (kind === "hidden") for (let y = 0; y < 8; y++) pen.fillRect((15 - y) % 8, y, 1.5, 1);
    else pen.fillRect(0, 0, 2, 2);
    return tile;
  };

  const fill = (pen, kind, x, y, width, height) => {
    pen.fillStyle = pen.createPattern(pattern(kind), "repeat");
    pen.fillRect(x, y, width, height);
  };

  // One pixel a pair; what is hidden stays clear, so that the hatching behind it shows.
  const painted = (h) => {
    const sheet = make("canvas", { width: C, height: R });
    const pen = sheet.getContext("2d"), image = pen.createImageData(C, R);
    const scale = SCALES[find("scale").value];
    for (let n = 0; n < R * C; n++) {
      const x = weights[h * R * C + n];
      if (!bit(seenBits, h * R * C + n) || !Number.isFinite(x)) continue;
      const shade = Math.max(0, Math.min(255, Math.round(255 * scale(x / data.most))));
      image.data.set(COLOURS.subarray(3 * shade, 3 * shade + 3), 4 * n);
      image.data[4 * n + 3] = 255;
    }
    pen.putImageData(image, 0, 0);
    return sheet;
  };

  const broken = (h) => {
    const places = [];
    for (let n = 0; n < R * C; n++) {
      if (bit(seenBits, h * R * C + n) && !Number.isFinite(weights[h * R * C + n])) places.push([Math.floor(n / C), n % C]);
    }
    return places;
  };

  const draw = (pen, h, x, y, width, height) => {
    fill(pen, "hidden", x, y, width, height);
    for (const [i, j] of broken(h)) fill(pen, "broken", x + (j * width) / C, y + (i * height) / R, width / C, height / R);
    pen.imageSmoothingEnabled = width < C || height < R;
    pen.drawImage(painted(h), x, y, width, height);
  };

  // Of a cell, across and down: a few rows of a long sequence are a strip that must still be seen.
  const side = Math.max(1, Math.min(26, Math.floor(680 / Math.max(R, C))), data.queries && Math.max(R, C) <= 64 ? NAMED : 1);
  const [cx, cy] = [C, R].map((n) => Math.max(side, Math.min(26, Math.floor(78 / n))));
  let left = 0, top = 0, ground = null;

  const clipped = (pen, text) => {
    if (pen.measureText(text).width <= LABEL) return text;
    const letters = [...text];
    while (letters.length && pen.measureText(`${letters.join("")}…`).width > LABEL) letters.pop();
    return `${letters.join("")}…`;
  };

  const digits = Math.max(String(data.rows[1]).length, String(data.columns[1]).length);
  const step = (cell) => [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n * cell >= 25 + 7 * digits) || 1000;

  const labels = (pen) => {
    pen.font = FONT;
    pen.fillStyle = colour("--ink");
    pen.textBaseline = "middle";
    const each = (count, cell, list, start, write) => {
      for (let n = 0; n < count; n++) {
        if (cell >= NAMED && list) write(n, clipped(pen, list[n]));
        else if ((n + start) % step(cell) === 0 || (count * cell < 45 && n === 0)) write(n, String(n + start));
      }
    };
    pen.textAlign = "right";
    each(R, cy, data.queries, data.rows[0], (i, text) => pen.fillText(text, left - 6, top + (i + 0.5) * cy));
    if (cy >= 9) {
      pen.textAlign = "left";
      for (let i = 0; i < R; i++) if (bit(emptyBits, head * R + i)) pen.fillText("∅", left + C * cx + 4, top + (i + 0.5) * cy);
    }
    const upright = cx >= NAMED && data.keys;
    each(C, cx, data.keys, data.columns[0], (j, text) => {
      pen.save();
      pen.translate(left + (j + 0.5) * cx, top - 6);
      if (upright) pen.rotate(-Math.PI / 2);
      pen.textAlign = upright ? "left" : "center";
      pen.fillText(text, 0, upright ? 0 : -4);
      pen.restore();
    });
  };

  // The picture without its cursor is kept, so that a move of the pointer repaints nothing else.
  const paint = () => {
    const map = find("map"), zoom = window.devicePixelRatio || 1;
    const measure = map.getContext("2d");
    measure.font = FONT;
    const longest = (list, cell) => (cell >= NAMED && list ? Math.max(...list.map((text) => Math.min(LABEL, measure.measureText(text).width))) + 14 : 16 + 7 * digits);
    [left, top] = [longest(data.queries, cy), longest(data.keys, cx)];
    const width = left + C * cx + 22, height = top + R * cy + 2;
    ground = make("canvas", { width: Math.round(width * zoom), height: Math.round(height * zoom) });
    const pen = ground.getContext("2d");
    pen.scale(zoom, zoom);
    draw(pen, head, left, top, C * cx, R * cy);
    pen.strokeStyle = colour("--rule");
    pen.strokeRect(left - 0.5, top - 0.5, C * cx + 1, R * cy + 1);
    labels(pen);
    Object.assign(map, { width: ground.width, height: ground.height });
    Object.assign(map.style, { width: `${width}px`, height: `${height}px` });
    cursor();
  };

  const cursor = () => {
    const map = find("map"), pen = map.getContext("2d"), zoom = window.devicePixelRatio || 1;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, map.width, map.height);
    pen.drawImage(ground, 0, 0);
    if (!moved) return;
    pen.scale(zoom, zoom);
    const [i, j] = at, x = left + j * cx, y = top + i * cy;
    pen.strokeStyle = colour("--cross");
    pen.lineWidth = 1;
    pen.strokeRect(left - 0.5, y - 0.5, C * cx + 1, cy + 1);
    pen.strokeRect(x - 0.5, top - 0.5, cx + 1, R * cy + 1);
    pen.lineWidth = held ? 3 : 2;
    pen.strokeRect(x - 1, y - 1, cx + 2, cy + 2);
  };

  const strongest = (i) => {
    const seen = [];
    for (let j = 0; j < C; j++) if (bit(seenBits, number(i, j))) seen.push(j);
    const size = (j) => (Number.isFinite(weights[number(i, j)]) ? weights[number(i, j)] : Infinity);
    const order = [...seen].sort((a, b) => size(b) - size(a) || a - b).slice(0, 12);
    const most = Math.max(Number.MIN_VALUE, ...order.map((j) => weights[number(i, j)]).filter(Number.isFinite));
    find("strongest").replaceChildren(...order.map((j) => {
      const x = weights[number(i, j)];
      const meter = make("meter", { max: most, value: Number.isFinite(x) ? x : 0, ariaLabel: "of the largest" });
      return make("tr", {}, make("td", { title: data.keys ? data.keys[j] : "" }, ...key(j)),
        make("td", { className: "number", textContent: said(x) }), make("td", {}, meter));
    }));
    const total = seen.reduce((sum, j) => sum + weights[number(i, j)], 0);
    find("row-title").textContent = `Strongest keys of query ${i + data.rows[0]}`;
    find("row-note").textContent = bit(emptyBits, head * R + i)
      ? "This query sees no key: its output is 0."
      : `It sees ${seen.length} of the ${C} keys shown; their weights sum to ${said(total)}.`;
  };

  const tell = () => {
    const [i, j] = at, n = number(i, j), x = weights[n];
    const visible = bit(seenBits, n);
    find("query").replaceChildren(...query(i));
    find("key").replaceChildren(...key(j));
    find("weight").textContent = visible ? said(x) : "hidden";
    find("pair").textContent = `Head ${data.heads[head]}, query ${i + data.rows[0]}, key ${j + data.columns[0]}: ` +
      (visible ? said(x) : "hidden") + (held ? " (held)" : "");
    strongest(i);
  };

  const go = (i, j) => {
    at = [Math.max(0, Math.min(R - 1, i)), Math.max(0, Math.min(C - 1, j))];
    moved = true;
    cursor();
    tell();
  };

  const reveal = () => {
    const view = find("map").parentElement, [i, j] = at;
    const near = (from, size, place, cell) => Math.min(Math.max(from, place + 2 * cell - size), place - cell);
    view.scrollLeft = near(view.scrollLeft, view.clientWidth, left + j * cx, cx + 8);
    view.scrollTop = near(view.scrollTop, view.clientHeight, top + i * cy, cy + 8);
  };

  const under = (event) => {
    const box = find("map").getBoundingClientRect();
    const i = Math.floor((event.clientY - box.top - top) / cy), j = Math.floor((event.clientX - box.left - left) / cx);
    return i >= 0 && i < R && j >= 0 && j < C ? [i, j] : null;
  };

  const ramp = () => {
    const pen = find("ramp").getContext("2d"), scale = find("scale").value;
    for (let x = 0; x < 128; x++) {
      pen.fillStyle = `rgb(${COLOURS.subarray(6 * x, 6 * x + 3).join(",")})`;
      pen.fillRect(x, 0, 1, 12);
    }
    find("low").textContent = scale === "log" ? `≤ ${said(LOWEST * data.most)}` : "0";
    find("high").textContent = said(data.most);
    for (const kind of ["hidden", "broken"]) {
      const sample = find(`sample-${kind}`);
      if (sample) fill(sample.getContext("2d"), kind, 0, 0, 30, 14);
    }
  };

  const all = () => {
    document.querySelectorAll(".small").forEach((small, h) => {
      const share = Math.min(72 / R, 72 / C);
      const [width, height] = [Math.max(4, C * share), Math.max(4, R * share)];
      const pen = small.getContext("2d");
      pen.clearRect(0, 0, 72, 72);
      draw(pen, h, (72 - width) / 2, (72 - height) / 2, width, height);
    });
    ramp();
    paint();
  };

  const MOVES = {
    ArrowUp: ([i, j]) => [i - 1, j], ArrowDown: ([i, j]) => [i + 1, j],
    ArrowLeft: ([i, j]) => [i, j - 1], ArrowRight: ([i, j]) => [i, j + 1],
    Home: ([i]) => [i, 0], End: ([i]) => [i, C - 1],
    PageUp: ([i, j]) => [i - 10, j], PageDown: ([i, j]) => [i + 10, j],
  };
  find("map").addEventListener("pointermove", (event) => {
    const place = held ? null : under(event);
    if (place && !(moved && place[0] === at[0] && place[1] === at[1])) go(...place);
  });
  find("map").addEventListener("click", (event) => {
    const place = under(event);
    if (!place) return;
    held = !(held && place[0] === at[0] && place[1] === at[1]);
    go(...place);
  });
  find("map").addEventListener("focus", () => go(...at));
  find("map").addEventListener("keydown", (event) => {
    if (event.key === "Escape") held = false;
    else if (!MOVES[event.key]) return;
    event.preventDefault();
    go(...(MOVES[event.key] ? MOVES[event.key](at) : at));
    reveal();
  });
  document.querySelector(".heads").addEventListener("change", (event) => {
    head = Number(event.target.value);
    paint();
    tell();
  });
  find("scale").addEventListener("change", all);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
  tell();
})();
