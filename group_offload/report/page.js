"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const tip = document.getElementById("tip");
  const LEFT = 66, TOP = 22, GAP = 6, ROW = { drive: 9, link: 20, gather: 20, decode: 20, compute: 20, around: 6, stalls: 14 };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  function seconds(s) {
    const [scale, unit] = Math.abs(s) >= 1 || !s ? [1, "s"] : Math.abs(s) >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return +(s * scale).toPrecision(4) + " " + unit;
  }
  function bytes(count) {
    let power = 0;
    while (power < 4 && count >= 1024 ** (power + 1)) power += 1;
    return +(count / 1024 ** power).toPrecision(3) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
  }
  function show(event, text) {
    tip.textContent = text;
    tip.hidden = !text;
    if (!text) return;
    const box = tip.getBoundingClientRect();
    const y = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18;
    tip.style.left = clamp(event.clientX + 12, 4, innerWidth - box.width - 4) + "px";
    tip.style.top = Math.max(4, y) + "px";
  }
  function prepare(canvas, height) {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return [pen, width];
  }

  // Where groups rest: one cell each, as wide as its bytes, in lines that follow each other.
  function map(canvas, model) {
    const HEIGHT = 20, total = model.cells.bytes.reduce((sum, each) => sum + each, 0) || 1;
    let places = [];
    function draw() {
      const lines = clamp(Math.ceil(model.cells.bytes.length / 90), 1, 12);
      const [pen, width] = prepare(canvas, lines * (HEIGHT + 3));
      places = [];
      let at = 0;
      model.cells.bytes.forEach((size, index) => {
        let rest = (size / total) * lines * width;
        pen.fillStyle = colour(model.cells.places[index]);
        do {
          const line = Math.min(lines - 1, Math.floor(at / width + 1e-9)), x = at - line * width;
          const part = line === lines - 1 ? rest : Math.min(rest, width - x);
          pen.fillRect(x, line * (HEIGHT + 3), part > 2.5 ? part - 1 : Math.max(part * 0.9, 0.3), HEIGHT);
          places.push([line, x, x + part, index]);
          at += part;
          rest -= part;
        } while (rest > 1e-6);
      });
    }
    canvas.addEventListener("pointermove", (event) => {
      const x = event.offsetX, line = Math.floor(event.offsetY / (HEIGHT + 3));
      const found = places.find((each) => each[0] === line && each[1] <= x && x < each[2]);
      if (!found) return show(event, "");
      const index = found[3], detail = model.cells.details[index];
      show(event, model.cells.names[index] + "\n" + bytes(model.cells.bytes[index]) + ", " +
        facts.places[model.cells.places[index]] + (detail ? "\n" + detail : ""));
    });
    canvas.addEventListener("pointerleave", (event) => show(event, ""));
    return draw;
  }

  // The timeline of one pass. `view` is what is seen of it, in shares of the pass.
  function time(figure, model) {
    const canvas = figure.querySelector("canvas.time"), caption = figure.querySelector("figcaption");
    let pass = model.passes.length - 1, view = [0, 1], hovered = null, boxes = [];
    const lanes = () => model.passes[pass].lanes;
    const limits = () => [-0.02, 1.02];
    function look(start, end) {
      const [low, high] = limits(), length = clamp(end - start, 1e-5, high - low);
      const from = clamp(start, low, high - length);
      view = [from, from + length];
      canvas.dataset.view = view.map((each) => each.toFixed(6)).join(" ");
      draw();
    }
    function zoom(factor, middle = (view[0] + view[1]) / 2) {
      look(middle + (view[0] - middle) * factor, middle + (view[1] - middle) * factor);
    }
    function draw() {
      const now = model.passes[pass];
      const height = TOP + now.lanes.reduce((sum, lane) => sum + ROW[lane.kind] * lane.rows + GAP, 0) + 4;
      const [pen, width] = prepare(canvas, height);
      const inside = width - LEFT - 6, toX = (share) => LEFT + ((share - view[0]) / (view[1] - view[0])) * inside;
      const ink = colour("ink"), soft = colour("soft"), line = colour("line"), track = colour("track");
      const span = (view[1] - view[0]) * now.seconds, ten = 10 ** Math.floor(Math.log10(span / Math.max(2, inside / 110)));
      const step = [1, 2, 5, 10].map((each) => each * ten).find((each) => span / each <= Math.max(2, inside / 90));
      pen.fillStyle = soft;
      pen.strokeStyle = line;
      for (let tick = Math.ceil((view[0] * now.seconds) / step) * step; tick <= view[1] * now.seconds && step; tick += step) {
        const x = toX(tick / now.seconds);
        pen.beginPath(); pen.moveTo(x, TOP - 4); pen.lineTo(x, height); pen.stroke();
        if (x > LEFT + 14 && x < width - 26) { pen.textAlign = "center"; pen.fillText(seconds(+tick.toPrecision(6)), x, 9); }
      }
      boxes = [];
      let y = TOP;
      for (const lane of now.lanes) {
        const row = ROW[lane.kind], tall = row * lane.rows;
        pen.fillStyle = track;
        pen.fillRect(LEFT, y, inside, tall);
        pen.fillStyle = soft;
        pen.textAlign = "right";
        pen.fillText(lane.label, LEFT - 8, y + tall / 2);
        const fill = colour(lane.kind === "around" ? "pass" : lane.kind), name = lane.names;
        for (let index = 0; index < lane.starts.length; index += 1) {
          const start = lane.starts[index] / 1e6, end = start + lane.lengths[index] / 1e6;
          if (end < view[0] || start > view[1]) continue;
          const x = Math.max(LEFT, toX(start)), right = Math.min(LEFT + inside, toX(end)), top = y + row * (lane.row[index] || 0);
          const wide = Math.max(right - x, 0.1), isSame = hovered !== null && name[index] === hovered;
          pen.fillStyle = fill;
          pen.globalAlpha = hovered === null || isSame ? 1 : 0.45;
          pen.fillRect(x, top + (row > 8 ? 1 : 0), wide > 3 ? wide - 0.7 : wide, row > 8 ? row - 2 : row - 1);
          pen.globalAlpha = 1;
          if (wide > 60 && row > 16) {
            pen.save(); pen.beginPath(); pen.rect(x, top, wide - 4, row); pen.clip();
            pen.fillStyle = colour("card"); pen.textAlign = "left"; pen.fillText(model.names[name[index]], x + 5, top + row / 2 + 1);
            pen.restore();
          }
          boxes.push([x, Math.max(right, x + 1), top, top + row, lane, index]);
        }
        y += tall + GAP;
      }
      pen.fillStyle = ink;
    }
    function choose(index) {
      pass = index;
      hovered = null;
      figure.querySelectorAll("button[data-pass]").forEach((each) =>
        each.setAttribute("aria-pressed", String(+each.dataset.pass === pass)));
      caption.textContent = model.passes[pass].caption;
      look(0, 1);
    }
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = [event.offsetX, ...view];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => { drag = null; });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointermove", (event) => {
      const inside = canvas.clientWidth - LEFT - 6;
      if (drag) {
        const moved = ((drag[0] - event.offsetX) / inside) * (drag[2] - drag[1]);
        show(event, "");
        return look(drag[1] + moved, drag[2] + moved);
      }
      const x = event.offsetX, y = event.offsetY;
      const hits = boxes.filter((each) => each[2] <= y && y < each[3] && each[0] - 2 <= x && x <= each[1] + 2);
      const best = hits.sort((a, b) => Math.abs(a[0] + a[1] - 2 * x) - Math.abs(b[0] + b[1] - 2 * x))[0];
      const before = hovered;
      hovered = best ? best[4].names[best[5]] : null;
      if (before !== hovered) draw();
      if (!best) return show(event, "");
      const [, , , , lane, index] = best, length = (lane.lengths[index] / 1e6) * model.passes[pass].seconds;
      const size = lane.bytes[index] || 0, moves = lane.kind === "drive" || lane.kind === "link";
      show(event, model.names[lane.names[index]] + "\n" + lane.label + ": " + seconds(length) + ", from " +
        seconds((lane.starts[index] / 1e6) * model.passes[pass].seconds) +
        (size ? "\n" + bytes(size) + (moves && length > 0 ? " at " + +(size / length / 1e9).toPrecision(3) + " GB/s" : "") : ""));
    });
    canvas.addEventListener("pointerleave", (event) => { hovered = null; draw(); show(event, ""); });
    canvas.addEventListener("wheel", (event) => {
      const length = view[1] - view[0];
      if (event.ctrlKey || event.metaKey) {
        const share = (event.offsetX - LEFT) / (canvas.clientWidth - LEFT - 6);
        zoom(Math.exp(event.deltaY * 0.004), view[0] + clamp(share, 0, 1) * length);
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const moved = ((event.deltaX || event.deltaY) / canvas.clientWidth) * length;
        look(view[0] + moved, view[1] + moved);
      } else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => {
      const share = (event.offsetX - LEFT) / (canvas.clientWidth - LEFT - 6);
      zoom(0.4, view[0] + clamp(share, 0, 1) * (view[1] - view[0]));
    });
    canvas.addEventListener("keydown", (event) => {
      const length = view[1] - view[0];
      const act = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => look(0, 1),
        ArrowLeft: () => look(view[0] - length / 4, view[1] - length / 4),
        ArrowRight: () => look(view[0] + length / 4, view[1] + length / 4) }[event.key];
      if (act && !event.ctrlKey && !event.metaKey) { act(); event.preventDefault(); }
    });
    figure.querySelectorAll("button[data-pass]").forEach((each) => each.addEventListener("click", () => choose(+each.dataset.pass)));
    const on = (act, what) => figure.querySelector(`button[data-act="${act}"]`).addEventListener("click", what);
    on("in", () => zoom(0.5));
    on("out", () => zoom(2));
    on("all", () => look(0, 1));
    choose(pass);
    return draw;
  }

  const draws = [];
  facts.models.forEach((model, index) => {
    const section = document.getElementById("model-" + index);
    const canvas = section.querySelector("canvas.map"), figure = section.querySelector("figure.passes");
    if (canvas) draws.push(map(canvas, model));
    if (figure && model.passes.length) draws.push(time(figure, model));
  });
  const drawAll = () => draws.forEach((draw) => draw());
  drawAll();
  addEventListener("resize", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.body.dataset.ready = "yes";
})();
