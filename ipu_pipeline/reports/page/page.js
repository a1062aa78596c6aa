// The page: its controls, and the two charts.
"use strict";

(() => {

  const data = JSON.parse(document.getElementById("data").textContent);
  const colours = data.colours, inks = data.inks, titles = data.titles;
  const byId = (id) => document.getElementById(id);
  const trace = byId("trace"), memory = byId("memory"), tip = byId("tip");
  const measured = unpack(data.measured);
  const simulated = new Map(); // timelines that were looked at, by pipeline and name
  const views = new Map();
  const listening = new Set();
  const state = { pipeline: data.first, view: data.isSimulated ? "free" : "measured", step: null, chosen: null, ipu: null };
  const left = 78, right = 16, top = 34, bottom = 44, phases = 18; // pixels
  const READABLE = 6; // pixels that an action takes at least when a trace is opened
  let view, unit, range, opening = null, pressed = null, drawing = false;

  const pipelineOf = () => data.pipelines[state.pipeline];

  /** A colour of the theme, see page.css. */
  const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function eventsOf(name) {
    if (name === "measured") return measured;
    const key = `${state.pipeline} ${name}`;
    if (!simulated.has(key)) simulated.set(key, unpack(pipelineOf().simulated[name]));
    return simulated.get(key);
  }

  function viewOf(name) {
    const key = `${state.pipeline} ${name}`;
    if (!views.has(key)) views.set(key, makeView(eventsOf(name), state.pipeline, pipelineOf().device));
    return views.get(key);
  }

  /** The steps of the view, as (number, begin, end). */
  const stepsOf = () =>
    state.view === "measured" ? pipelineOf().steps : [[null, view.first, view.last]];

  function wholeRange() {
    const margin = Math.max(0.01 * (view.last - view.first), 1e-3);
    return [view.first - margin, view.last + margin];
  }

  function stepRange() {
    const found = stepsOf().find((step) => step[0] === state.step);
    if (!found) return wholeRange();
    const margin = Math.max(0.02 * (found[2] - found[1]), 1e-3);
    return [found[1] - margin, found[2] + margin];
  }

  /** The step; where most of its actions would be too narrow to be read, its beginning. */
  function openingRange() {
    const whole = state.view === "measured" ? stepRange() : wholeRange();
    const { events } = view;
    const lengths = [];
    let first = Infinity;
    for (let at = 0; at < events.count; at++)
      if (events.batch[at] >= 0 && events.ipu[at] >= 0 && events.source[at] < 0 && events.pipeline[at] === state.pipeline &&
          events.begin[at] >= whole[0] && events.end[at] <= whole[1]) {
        lengths.push(events.end[at] - events.begin[at]);
        first = Math.min(first, events.begin[at]);
      }
    const median = lengths.sort((a, b) => a - b)[lengths.length >> 1] ?? Infinity;
    const longest = median * width() / READABLE;
    opening = longest < whole[1] - whole[0] ? [first - 0.02 * longest, first + 0.98 * longest] : null;
    return opening ?? whole;
  }

  const rowHeight = () => Math.max(9, Math.min(48, 900 / view.rows.length));
  const lowest = () => view.rows.length - 0.5 + phases / rowHeight(); // where the vertical axis ends
  const width = () => Math.max(200, trace.clientWidth - left - right);

  // --- the trace

  function drawTrace() {
    const bars = makeBars(view, range, width(), state.chosen);
    const kinds = view.events.kinds;
    const present = new Set(view.look);
    const scaled = (values) => values.map((value) => value === null ? null : value / unit.size);
    const filled = (polygons, name, colour, more) => ({
      type: "scatter", mode: "none", fill: "toself", hoverinfo: "skip", x: scaled(polygons.x), y: polygons.y,
      fillcolor: colour, name, ...more,
    });
    const visible = stepsOf().filter((step) => step[2] >= range[0] && step[1] <= range[1]);
    const idle = makeIdle(view, visible.map((step) => step.slice(1)), pipelineOf().ipus);
    const traces = [filled(idle, "waiting", shade("idle"), { showlegend: visible.length > 0 })];
    kinds.forEach((kind, number) => {
      if (!present.has(number)) return;
      const bar = { meta: kind, opacity: state.chosen ? 0.28 : 1, showlegend: !state.chosen };
      traces.push(filled(bars.base[number], titles[kind], colours[kind], bar));
      if (state.chosen) traces.push(filled({ x: [null], y: [null] }, titles[kind], colours[kind]));
    });
    if (state.chosen) {
      kinds.forEach((kind, number) => {
        if (!bars.chosen[number].x.length) return;
        traces.push(filled(bars.chosen[number], titles[kind], colours[kind], { showlegend: false, meta: `chosen ${kind}` }));
      });
      traces.push(pathOfChosen());
    }
    traces.push(labels(bars.labels));
    const axis = { fixedrange: false, gridcolor: shade("grid"), zeroline: false };
    const rows = view.rows.length;
    Plotly.react(trace, traces, {
      margin: { l: left, r: right, t: top, b: bottom },
      width: trace.clientWidth, height: top + bottom + rows * rowHeight() + phases,
      xaxis: {
        ...axis, range: range.map((time) => time / unit.size), title: { text: `time (${unit.name})`, standoff: 6 },
      },
      yaxis: {
        fixedrange: true, range: [lowest(), -0.5], zeroline: false, showgrid: false,
        tickvals: view.rows.map((_row, number) => number), ticktext: view.rows.map((row) => row.title),
      },
      legend: {
        orientation: "h", x: 0, y: 1, yanchor: "bottom", itemclick: false, itemdoubleclick: false, traceorder: "normal",
      },
      ...marks(visible), ...looks(),
    }, config);
    tellDrawn(bars);
  }

  const config = {
    displaylogo: false, responsive: false, scrollZoom: false, doubleClick: false, showTips: false,
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "toImage"]],
  };
  const looks = () => ({
    font: { family: "system-ui, sans-serif", size: 13, color: shade("ink") },
    paper_bgcolor: shade("paper"), plot_bgcolor: shade("paper"), dragmode: "zoom", hovermode: false,
    modebar: { bgcolor: "rgba(0,0,0,0)", color: shade("line"), activecolor: shade("ink") },
    hoverlabel: { bgcolor: shade("fill"), bordercolor: shade("line"), font: { color: shade("ink") } },
  });

  /** The numbers of micro-batches in the bars that have room for them. */
  function labels(places) {
    const { events, heights } = view;
    const { ipus, stages, replicas } = pipelineOf();
    const isSeveral = ipus.length < stages.length * replicas;
    const shown = places.filter((at) => events.batch[at] >= 0 && view.look[at] === events.kind[at]);
    const shift = (at) => {
      const row = view.rows.findIndex((own) => own.ipu === events.ipu[at]);
      return (heights[2 * row][0] + heights[2 * row][1]) / 2;
    };
    const pixel = (range[1] - range[0]) / width();
    const texts = shown.map((at) => isSeveral ? `${events.stage[at]}.${events.batch[at]}` : `${events.batch[at]}`);
    const seen = (at) => Math.min(events.end[at], range[1]) - Math.max(events.begin[at], range[0]);
    const fits = shown.map((at, place) => seen(at) / pixel > 6.3 * texts[place].length + 1.5);
    const keep = (values) => values.filter((_value, place) => fits[place]);
    const kept = keep(shown);
    return {
      type: "scatter", mode: "text", hoverinfo: "skip", showlegend: false, meta: "labels", cliponaxis: true,
      x: kept.map((at) => {
        const begin = Math.max(events.begin[at], range[0]), end = Math.min(events.end[at], range[1]);
        return (begin + end) / 2 / unit.size;
      }),
      y: kept.map(shift),
      text: keep(texts),
      textfont: { size: 11, color: kept.map((at) => state.chosen && !isChosen(view, at, state.chosen)
        ? shade("ink") : inks[events.kinds[events.kind[at]]]) },
    };
  }

  /** The places of what is highlighted, in the order of time. */
  function chosenPlaces() {
    const found = [];
    for (let at = 0; at < view.events.count; at++)
      if (isChosen(view, at, state.chosen)) found.push(at);
    return found;
  }

  /** Lines from each action that is highlighted to the next one. */
  function pathOfChosen() {
    const { events, heights, rows } = view;
    const x = [], y = [];
    let before = -1;
    const middle = (at) => {
      const row = rows.findIndex((own) => own.ipu === events.ipu[at]);
      return (heights[2 * row][0] + heights[2 * row][1]) / 2;
    };
    for (const at of chosenPlaces()) {
      if (events.kinds[events.kind[at]] === "transfer") continue;
      if (before >= 0 && events.step[at] === events.step[before] && events.ipu[at] !== events.ipu[before]) {
        x.push(events.end[before] / unit.size, events.begin[at] / unit.size, null);
        y.push(middle(before), middle(at), null);
      }
      before = at;
    }
    return {
      type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false, meta: "path", x, y,
      line: { color: shade("ink"), width: 1.5, dash: "dot" },
    };
  }

  /** Lines where steps begin, and the phases of a step. */
  function marks(steps) {
    const shapes = [], annotations = [];
    const line = (time, dash) => shapes.push({
      type: "line", xref: "x", yref: "paper", x0: time / unit.size, x1: time / unit.size, y0: 0, y1: 1, layer: "above",
      line: { color: shade("mark"), width: 1, dash },
    });
    if (steps.length <= 60) for (const step of steps) line(step[1], "solid");
    if (steps.length > 3 || !pipelineOf().hasPhases) return { shapes, annotations };
    for (const step of steps) {
      for (const [name, begin, end] of findPhases(view, step[0] ?? -1)) {
        const seen = [Math.max(begin, range[0]), Math.min(end, range[1])];
        if (name !== "ramp-up" && begin > range[0]) line(begin, "dot");
        if ((seen[1] - seen[0]) / (range[1] - range[0]) * width() < 7.5 * name.length) continue;
        annotations.push({
          x: (seen[0] + seen[1]) / 2 / unit.size, y: 0, xref: "x", yref: "paper", yanchor: "bottom", text: name,
          showarrow: false, font: { size: 11, color: shade("soft") }, bgcolor: shade("paper"), borderpad: 1,
        });
      }
    }
    return { shapes, annotations };
  }

  function tellDrawn(bars) {
    const words = [];
    if (range === opening) words.push("This is the beginning of the step, where actions can be told apart. “Whole step” shows all of it.");
    if (bars.numSummed) words.push(
      `${bars.numSummed.toLocaleString("en")} actions here are narrower than a pixel. They are summed up: ` +
      "the height of a colour is its share of the time. Zoom in to see them one by one."
    );
    if (state.view !== "measured" && !data.isSimulated) words.push("Simulated: one step, from measured times of stages.");
    byId("drawn").textContent = words.join(" ");
    trace.dataset.drawn = bars.numDrawn;
    trace.dataset.summed = bars.numSummed;
  }

  // --- what is under the pointer, and what is highlighted

  function placeOf(pointer) {
    const area = trace.querySelector(".nsewdrag")?.getBoundingClientRect();
    if (!area || pointer.clientX < area.left || pointer.clientX > area.right || pointer.clientY < area.top ||
        pointer.clientY > area.bottom) return -1;
    const pixel = (range[1] - range[0]) / area.width;
    const time = range[0] + (pointer.clientX - area.left) * pixel;
    const height = (pointer.clientY - area.top) / area.height * (lowest() + 0.5) - 0.5;
    return findEvent(view, time, height, pixel);
  }

  function showTip(pointer) {
    const at = placeOf(pointer);
    tip.hidden = at < 0;
    if (at >= 0) putTip(describeEvent(view, at, data.pipelines), pointer);
  }

  /** Shows lines beside the pointer. */
  function putTip(lines, pointer) {
    tip.hidden = false;
    tip.replaceChildren(...lines.map((text, place) => {
      const line = document.createElement(place ? "div" : "strong");
      line.textContent = text;
      return line;
    }));
    const box = tip.getBoundingClientRect();
    const x = pointer.clientX + 14, y = pointer.clientY + 14;
    tip.style.left = `${x + box.width > innerWidth ? pointer.clientX - box.width - 10 : x}px`;
    tip.style.top = `${y + box.height > innerHeight ? pointer.clientY - box.height - 10 : y}px`;
  }

  function choose(chosen) {
    const same = chosen && state.chosen && chosen.batch === state.chosen.batch && chosen.step === state.chosen.step;
    state.chosen = same ? null : chosen;
    byId("batch").value = state.chosen ? state.chosen.batch : "";
    drawTrace();
    listChosen();
  }

  function listChosen() {
    const list = byId("chosen");
    list.hidden = !state.chosen;
    if (!state.chosen) return;
    const { events } = view;
    const places = chosenPlaces();
    const ofStep = state.chosen.step === null ? "" : ` of step ${state.chosen.step}`;
    list.querySelector("caption").textContent = places.length
      ? `Micro-batch ${state.chosen.batch}${ofStep}` +
        (places.length > 200 ? `: the first 200 of ${places.length} actions` : "")
      : `There is no micro-batch ${state.chosen.batch}${ofStep} in this trace.`;
    list.tHead.hidden = !places.length;
    list.tBodies[0].replaceChildren(...places.slice(0, 200).map((at) => {
      const row = document.createElement("tr");
      const kind = events.kinds[events.kind[at]];
      const cells = [
        kind, events.stage[at], events.source[at] >= 0 ? `${events.source[at]} to ${events.ipu[at]}` : events.ipu[at],
        formatTime(events.begin[at]),
        events.flags[at] & BOUNDED ? "not seen" : formatTime(events.end[at] - events.begin[at]),
        events.bytes[at] ? formatBytes(events.bytes[at]) : "",
      ];
      for (const [place, text] of cells.entries()) {
        const cell = document.createElement(place ? "td" : "th");
        if (!place) cell.scope = "row";
        cell.textContent = text;
        row.append(cell);
      }
      return row;
    }));
  }

  // --- memory

  const held = new Map(); // what IPUs hold, unpacked, by pipeline and view

  /** Of each IPU the times in microseconds, what it holds from then on of each part, and all of it. */
  function memoryOf(name) {
    const key = `${state.pipeline} ${name}`;
    if (!held.has(key)) held.set(key, (pipelineOf().memory[name] ?? []).map((one) => {
      let time = 0;
      const times = unpackColumn(one.times, one.count, Float64Array).map((step) => (time += step) / 1000);
      const totals = new Float64Array(times.length);
      const parts = one.parts.map((part) => ({ ...part, values: unpackColumn(part.values, one.count, Float64Array) }));
      for (const part of parts) for (let at = 0; at < times.length; at++) totals[at] += part.values[at];
      return { ...one, parts, times, totals };
    }));
    return held.get(key);
  }

  function drawMemory() {
    const found = memoryOf(state.view);
    byId("memory-section").hidden = !found.length;
    if (!found.length) return;
    const own = found.find((one) => one.ipu === state.ipu);
    const most = Math.max(...(own ? [own] : found).map((one) => one.totals.reduce((a, b) => Math.max(a, b), 0)));
    const [bytes, word] = unitOfBytes(most);
    const shown = (times, values) => {
      const thin = thinOut(times, values, range, width());
      return { x: thin.times.map((time) => time / unit.size), y: thin.values.map((value) => value / bytes) };
    };
    const line = (name, more) => ({ type: "scatter", mode: "lines", name, line: { shape: "hv", width: 1.5 }, ...more });
    const traces = own
      ? own.parts.map((part) => line(part.name, {
        ...shown(own.times, part.values), stackgroup: "parts", line: { shape: "hv", width: 0.5 },
        fillcolor: data.parts[part.name], hovertemplate: `%{y:.4~g} ${word}<extra>${part.name}</extra>`,
      }))
      : found.map((one, number) => line(`${pipelineOf().device} ${one.ipu}`, {
        ...shown(one.times, one.totals), hovertemplate: `%{y:.4~g} ${word}<extra>${pipelineOf().device} ${one.ipu}</extra>`,
        line: { shape: "hv", width: 2, dash: ["solid", "dash", "dot", "dashdot"][number >> 3 & 3],
                color: data.lines[number % data.lines.length] },
      }));
    for (const one of traces) one.line.color ??= one.fillcolor;
    tellPeak(found);
    Plotly.react(memory, traces, {
      ...looks(), hovermode: "x unified", width: memory.clientWidth, height: 300, margin: { l: left, r: right, t: 30, b: bottom },
      xaxis: { range: range.map((time) => time / unit.size), title: { text: `time (${unit.name})`, standoff: 6 },
               gridcolor: shade("grid"), zeroline: false },
      yaxis: { range: [0, most / bytes * 1.08 || 1], gridcolor: shade("grid"), fixedrange: true, zeroline: false,
               title: { text: word, standoff: 6 } },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
      showlegend: true,
    }, config);
  }

  /** Says which IPU holds most, and when first. */
  function tellPeak(found) {
    let most = { size: -1 };
    for (const one of found)
      one.totals.forEach((size, at) => { if (size > most.size) most = { size, time: one.times[at], ipu: one.ipu }; });
    byId("peak").textContent = capitalise(`${pipelineOf().device} ${most.ipu} holds most: ${formatBytes(most.size)}, first at ${formatTime(most.time)}. ` +
      "What is there all the time, and the bytes of an activation, are the plan's; when activations come and go is " +
      `${state.view === "measured" ? "measured" : "simulated"}.`);
  }

  /** At most a few values per pixel, with the largest one of each; steps before and behind are kept. */
  function thinOut(times, values, range, width) {
    const found = { times: [], values: [] };
    const put = (time, size) => {
      found.times.push(time);
      found.values.push(size);
    };
    const pixel = (range[1] - range[0]) / width;
    let at = 0;
    while (at + 1 < times.length && times[at + 1] <= range[0]) at++;
    while (at < times.length && times[at] <= range[1]) {
      const end = times[at] + pixel;
      let most = values[at], last = at;
      while (last + 1 < times.length && times[last + 1] < end) most = Math.max(most, values[++last]);
      put(times[at], most);
      if (last > at) put(Math.max(times[last], times[at] + pixel / 2), values[last]);
      at = last + 1;
    }
    if (found.times.length) put(Math.max(range[1], found.times.at(-1)), found.values.at(-1));
    return found;
  }

  // --- other settings

  /** Their step times, as with the present number of micro-batches, against the most memory of a device. */
  function drawSettings() {
    const chart = document.querySelector(`[data-pipeline="${state.pipeline}"] .settings`);
    if (!chart) return;
    const { settings, device, count } = pipelineOf();
    const [bytes, word] = unitOfBytes(Math.max(...settings.map((one) => one.bytes)));
    const longest = Math.max(...settings.map((one) => one.time));
    const [size, name] = longest >= 1e6 ? [1e6, "s"] : longest >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "pentagon"];
    const places = ["bottom right", "middle right", "bottom center", "middle left", "top right"];
    const changes = [...new Set(settings.map((one) => one.change))];
    const traces = changes.map((change, number) => {
      const own = settings.filter((one) => one.change === change);
      return {
        type: "scatter", mode: "markers+text", name: change, hoverinfo: "none", customdata: own.map((one) => one.lines),
        x: own.map((one) => one.bytes / bytes), y: own.map((one) => one.time / size),
        text: own.map((one) => one.rank || ""), textposition: own.map((one) => places[one.rank - 1] ?? places[0]),
        marker: { size: change === "now" ? 15 : 10, symbol: change === "now" ? "star" : symbols[number % 8],
                  color: change === "now" ? shade("ink") : data.lines[number % data.lines.length],
                  line: { width: 1, color: shade("paper") } },
      };
    });
    const axis = (key, text) => {
      const values = settings.map((one) => one[key]);
      const isWide = Math.max(...values) > 3 * Math.min(...values); // then a step of the axis doubles
      return { title: { text, standoff: 6, font: { size: 13 } }, gridcolor: shade("grid"), zeroline: false,
               ...isWide ? { type: "log", dtick: Math.log10(2) } : {} };
    };
    Plotly.react(chart, traces, {
      ...looks(), hovermode: "closest", dragmode: false, width: chart.clientWidth, height: 360,
      margin: { l: 64, r: right, t: 40, b: bottom },
      xaxis: axis("bytes", `most memory of ${device === "IPU" ? "an" : "a"} ${device} (${word})`),
      yaxis: axis("time", `step of ${count} micro-batches (${name})`),
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" }, showlegend: true,
    }, { displayModeBar: false, doubleClick: false, showTips: false });
    if (listening.has(chart)) return;
    listening.add(chart);
    chart.on("plotly_hover", (found) => putTip(found.points[0].customdata, found.event));
    chart.on("plotly_unhover", () => { tip.hidden = true; });
  }

  // --- controls

  /** Shows a range of time in both charts. */
  function show(newRange) {
    if (drawing) return;
    drawing = true;
    range = newRange;
    drawTrace();
    drawMemory();
    drawing = false;
    for (const chart of [trace, memory]) listen(chart);
  }

  /** Follows a chart that was zoomed, from when it is first drawn. */
  function listen(chart) {
    if (!chart.on || listening.has(chart)) return;
    listening.add(chart);
    chart.on("plotly_relayout", (changed) => {
      const keys = ["xaxis.range[0]", "xaxis.range[1]"];
      if (keys.every((key) => key in changed)) show(keys.map((key) => changed[key] * unit.size));
    });
    chart.addEventListener("dblclick", () => show(wholeRange()));
  }

  function open(isNewRange = true) {
    view = viewOf(state.view);
    const length = view.last - view.first;
    unit = length >= 1e7 ? { name: "s", size: 1e6 } : length >= 1e4 ? { name: "ms", size: 1e3 } : { name: "µs", size: 1 };
    byId("step").disabled = state.view !== "measured";
    if (isNewRange) show(openingRange());
    listChosen();
  }

  function openPipeline() {
    const own = pipelineOf();
    for (const section of document.querySelectorAll("[data-pipeline]"))
      section.hidden = Number(section.dataset.pipeline) !== state.pipeline;
    for (const element of document.querySelectorAll(".device")) element.textContent = own.device;
    for (const input of document.querySelectorAll("input[name=view]")) {
      input.disabled = input.value === "measured" ? data.isSimulated : !own.simulated[input.value];
      input.checked = input.value === state.view;
      input.parentElement.hidden = input.value === "measured" && data.isSimulated;
    }
    if (state.view !== "measured" && !own.simulated[state.view]) {
      state.view = "measured";
      document.querySelector("input[value=measured]").checked = true;
    }
    state.step = own.typical;
    const typical = (step) => step === own.typical && own.steps.length > 2 ? " (median)" : "";
    byId("step").replaceChildren(
      new Option("all", ""), ...own.steps.map((step) => new Option(`${step[0]}${typical(step[0])}`, step[0]))
    );
    byId("step").value = state.step ?? "";
    state.ipu = null;
    byId("ipu").replaceChildren(
      new Option("all", ""), ...own.ipus.map((ipu) => new Option(`${own.device} ${ipu}, by what it is`, ipu))
    );
    state.chosen = null;
    byId("batch").value = "";
    open();
    drawSettings();
  }

  /** Draws everything again, in another size or theme. */
  function redraw() {
    if (!data.pipelines.length) return;
    show(range);
    drawSettings();
  }

  byId("pipeline")?.addEventListener("change", (event) => {
    state.pipeline = Number(event.target.value);
    openPipeline();
  });
  for (const input of document.querySelectorAll("input[name=view]"))
    input.addEventListener("change", () => {
      state.view = input.value;
      if (state.chosen) state.chosen.step = state.view === "measured" ? state.step : null;
      open();
    });
  byId("step").addEventListener("change", (event) => {
    state.step = event.target.value === "" ? null : Number(event.target.value);
    if (state.chosen) state.chosen.step = state.step;
    show(stepRange());
    listChosen();
  });
  byId("batch").addEventListener("change", (event) => {
    const batch = event.target.value.trim();
    const step = state.view === "measured" ? state.step : null;
    choose(/^\d+$/.test(batch) ? { batch: Number(batch), step } : null);
  });
  byId("clear").addEventListener("click", () => choose(null));
  byId("whole").addEventListener("click", () => show(wholeRange()));
  byId("zoom").addEventListener("click", () => show(state.view === "measured" ? stepRange() : wholeRange()));
  byId("ipu").addEventListener("change", (event) => {
    state.ipu = event.target.value === "" ? null : Number(event.target.value);
    drawMemory();
  });

  trace.addEventListener("pointermove", (event) => requestAnimationFrame(() => showTip(event)));
  trace.addEventListener("pointerleave", () => { tip.hidden = true; });
  trace.addEventListener("pointerdown", (event) => { pressed = [event.clientX, event.clientY]; }, true);
  addEventListener("pointerup", (event) => {
    const isClick = pressed && Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]) < 4;
    pressed = null;
    if (!isClick) return;
    const at = placeOf(event);
    if (at < 0) return;
    const { events } = view;
    if (events.batch[at] < 0 || events.stage[at] < 0 || events.pipeline[at] !== state.pipeline) return;
    choose({ batch: events.batch[at], step: events.step[at] >= 0 ? events.step[at] : null });
  }, true);
  trace.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    const area = trace.querySelector(".nsewdrag").getBoundingClientRect();
    const fixed = range[0] + (event.clientX - area.left) / area.width * (range[1] - range[0]);
    const factor = Math.exp(Math.max(-100, Math.min(100, event.deltaY)) / 200);
    show(range.map((time) => fixed + (time - fixed) * factor));
  }, { passive: false });
  let resized = 0;
  addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(redraw, 150);
  });

  for (const [event, prints] of [["beforeprint", true], ["afterprint", false]])
    addEventListener(event, () => {
      document.documentElement.classList.toggle("printing", prints); // charts are as wide as paper, see page.css
      redraw();
    });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  if (data.pipelines.length) openPipeline();
  else document.querySelector("main").textContent = "No pipeline and no loop was recorded.";
  requestAnimationFrame(() => requestAnimationFrame(() => {
    performance.mark("trace visible");
    document.body.dataset.ready = "yes";
  }));
})();
