// Timelines: columns unpacked, bars as polygons for what is in view, and what lies under the pointer.
// Bars are not Plotly's: 40,000 would be as many elements. All bars of a colour are one filled path, made anew
// for what is in view. Bars narrower than a pixel are summed up per pixel, which keeps their share of the time;
// drawing each at least a pixel wide would not. So the text under the pointer is found in the data.
"use strict";

const SHARED = 1, BOUNDED = 2;
const NARROW = 1.5; // pixels: bars below that are summed up, unless they stand alone
const LEAST_HEIGHT = 0.15; // of a lane, so that a sum can be seen
const MOST_LABELS = 900;
const SLIP = 3; // pixels beside a bar that still count as on it

/** Unpacks `count` integers that `pack_column` packed. */
function unpackColumn(packed, count, type) {
  const values = new type(count);
  if (typeof packed === "number") return values.fill(packed);
  const bytes = atob(packed);
  let place = 0;
  for (let at = 0; at < count; at++) {
    let value = 0, scale = 1, byte;
    do {
      byte = bytes.charCodeAt(place++);
      value += (byte & 127) * scale; // not by shifts, which are of 32 bits
      scale *= 128;
    } while (byte & 128);
    values[at] = value % 2 ? -(value + 1) / 2 : value / 2;
  }
  return values;
}

/** Events from the columns of `pack`, with times in microseconds. */
function unpack(columns) {
  const count = columns.count;
  const expand = (values, type) => unpackColumn(values, count, type);
  const events = { count, kinds: columns.kinds, names: columns.names };
  for (const name of ["kind", "flags"]) events[name] = expand(columns[name], Uint8Array);
  for (const name of ["ipu", "pipeline", "stage", "batch", "step", "source", "name"])
    events[name] = expand(columns[name], Int32Array);
  events.bytes = expand(columns.bytes, Float64Array);
  const steps = expand(columns.begin, Float64Array), lengths = expand(columns.length, Float64Array);
  events.begin = new Float64Array(count);
  events.end = new Float64Array(count);
  let time = 0;
  for (let at = 0; at < count; at++) {
    time += steps[at];
    events.begin[at] = time / 1000;
    events.end[at] = (time + lengths[at]) / 1000;
  }
  return events;
}

const capitalise = (text) => text[0].toUpperCase() + text.slice(1);

/** A view of a timeline: a row per IPU and one for the host, each with a lane for actions and one below. */
function makeView(events, pipeline, device) {
  const [transfer, outfeed, span] = ["transfer", "outfeed", "span"].map((kind) => events.kinds.indexOf(kind));
  const ipus = [...new Set(events.ipu)].filter((ipu) => ipu >= 0).sort((a, b) => a - b);
  const rows = ipus.map((ipu) => ({ ipu, title: capitalise(`${device} ${ipu}`) }));
  const rowOf = new Map(ipus.map((ipu, row) => [ipu, row]));
  const hosts = [...new Set(events.ipu)].filter((ipu) => ipu < 0).sort((a, b) => b - a);
  for (const ipu of hosts) { // -1 - n is the host of process n
    rowOf.set(ipu, rows.length);
    rows.push({ ipu, title: hosts.some((other) => other < -1) ? `Host of process ${-1 - ipu}` : "Host" });
  }
  const hasTransfers = events.kind.includes(transfer);
  const lanes = Array.from({ length: 2 * rows.length }, () => []);
  const look = new Uint8Array(events.count); // what is drawn: the kind, or the last one for others
  for (let at = 0; at < events.count; at++) {
    const isBelow = [transfer, outfeed, span].includes(events.kind[at]);
    const isOthers = events.pipeline[at] >= 0 && events.pipeline[at] !== pipeline;
    look[at] = isOthers ? events.kinds.length - 1 : events.kind[at];
    lanes[2 * rowOf.get(events.ipu[at]) + isBelow].push(at);
  }
  const heights = lanes.map((_lane, number) => {
    const middle = number >> 1;
    if (number % 2) return [middle + 0.25, middle + 0.4];
    const isSplit = hasTransfers && rows[middle].ipu >= 0 || lanes[number + 1].length;
    return [middle - 0.4, middle + (isSplit ? 0.21 : 0.4)];
  });
  const first = events.count ? events.begin[0] : 0;
  const last = events.end.reduce((most, end) => Math.max(most, end), first);
  return { events, pipeline, rows, lanes, heights, look, first, last };
}

/** Whether an event is of the micro-batch that is highlighted. */
function isChosen(view, at, chosen) {
  const events = view.events;
  return chosen !== null && events.batch[at] === chosen.batch && events.stage[at] >= 0 &&
    (events.pipeline[at] === view.pipeline) && (chosen.step === null || events.step[at] === chosen.step);
}

function addBar(polygons, left, right, top, bottom) {
  polygons.x.push(left, right, right, left, left, null);
  polygons.y.push(top, top, bottom, bottom, top, null);
}

/**
 * The bars within a range of time.
 *
 * What is narrower than a pixel and has neighbours is summed up per pixel: the height of a colour is then its
 * share of the time. All others are bars of their own.
 */
function makeBars(view, range, width, chosen) {
  const { events, lanes, heights, look } = view;
  const numLooks = events.kinds.length;
  const empty = () => Array.from({ length: numLooks }, () => ({ x: [], y: [] }));
  const bars = { base: empty(), chosen: empty(), labels: [], numDrawn: 0, numSummed: 0 };
  const pixel = (range[1] - range[0]) / width;
  const from = range[0] - (range[1] - range[0]) / 2, to = range[1] + (range[1] - range[0]) / 2;
  const bin = pixel * Math.max(1, Math.round(view.rows.length / 16));
  const numBins = Math.ceil((to - from) / bin) + 1;

  lanes.forEach((lane, number) => {
    const [top, bottom] = heights[number];
    const narrow = [];
    const starts = new Uint32Array(numBins + 2);
    for (const at of lane) {
      const begin = events.begin[at], end = events.end[at];
      if (end < from || begin > to) continue;
      if (isChosen(view, at, chosen)) {
        const spare = Math.max(0, 2 * pixel - (end - begin)) / 2;
        addBar(bars.chosen[look[at]], begin - spare, end + spare, top, bottom);
        bars.numDrawn++;
      } else if (end - begin < NARROW * pixel) {
        narrow.push(at);
        starts[1 + Math.max(0, Math.floor((begin - from) / bin))]++;
        continue;
      } else {
        const inset = Math.min(0.5 * pixel, 0.1 * (end - begin));
        addBar(bars.base[look[at]], begin + inset, end - inset, top, bottom);
        bars.numDrawn++;
      }
      if (number % 2 === 0 && end - begin > 10 * pixel && end > range[0] && begin < range[1]) bars.labels.push(at);
    }
    if (!narrow.length) return;
    const times = new Float64Array(numBins * numLooks);
    for (const at of narrow) {
      const begin = events.begin[at], end = events.end[at];
      const place = Math.max(0, Math.floor((begin - from) / bin));
      if (starts[1 + place] === 1 && !starts[place] && !starts[place + 2]) {
        const spare = Math.max(0, pixel - (end - begin)) / 2;
        addBar(bars.base[look[at]], begin - spare, end + spare, top, bottom);
        bars.numDrawn++;
        continue;
      }
      bars.numSummed++;
      const last = Math.min(numBins - 1, Math.floor((end - from) / bin));
      for (let other = place; other <= last; other++) {
        const left = from + other * bin;
        times[other * numLooks + look[at]] += Math.max(
          Math.min(end, left + bin) - Math.max(begin, left), 1e-6 * bin
        );
      }
    }
    for (let place = 0; place < numBins; place++) {
      let total = 0;
      for (let kind = 0; kind < numLooks; kind++) total += times[place * numLooks + kind];
      if (!total) continue;
      const height = Math.min(1, Math.max(LEAST_HEIGHT, total / bin)) * (bottom - top);
      let reached = bottom;
      for (let kind = 0; kind < numLooks; kind++) {
        const own = times[place * numLooks + kind] / total * height;
        if (!own) continue;
        addBar(bars.base[kind], from + place * bin, from + (place + 1) * bin, reached - own, reached);
        reached -= own;
      }
    }
  });
  if (bars.labels.length > MOST_LABELS) bars.labels = [];
  return bars;
}

/** When IPUs with stages were within a step: what is seen of it is waiting. */
function makeIdle(view, spans, ipus) {
  const polygons = { x: [], y: [] };
  const merged = [];
  for (const [begin, end] of spans) {
    const before = merged[merged.length - 1];
    if (before && begin <= before[1]) before[1] = Math.max(before[1], end);
    else merged.push([begin, end]);
  }
  view.rows.forEach((row, number) => {
    if (!ipus.includes(row.ipu)) return;
    const [top, bottom] = view.heights[2 * number];
    for (const [begin, end] of merged) addBar(polygons, begin, end, top, bottom);
  });
  return polygons;
}

/** The event at a place: of those there the shortest one; -1 if there is none. */
function findEvent(view, time, height, pixel) {
  const { events, lanes, heights } = view;
  let found = -1;
  lanes.forEach((lane, number) => {
    if (height < heights[number][0] || height > heights[number][1]) return;
    const length = (at) => events.end[at] - events.begin[at];
    const distance = (at) => Math.max(0, events.begin[at] - time, time - events.end[at]);
    for (const at of lane) {
      if (events.begin[at] > time + SLIP * pixel) break; // lanes are by begin
      if (distance(at) > SLIP * pixel) continue;
      const nearer = found < 0 ? -1 : distance(at) - distance(found);
      if (nearer < 0 || nearer === 0 && length(at) <= length(found)) found = at;
    }
  });
  return found;
}

/** The phases of a step: until every IPU has begun, until the first one has finished, and from then on. */
function findPhases(view, step) {
  const { events } = view;
  const ofStages = ["forward", "backward", "input gradients", "weight gradients"].map((kind) => events.kinds.indexOf(kind));
  const firsts = new Map(), lasts = new Map();
  let begin = Infinity, end = -Infinity;
  for (let at = 0; at < events.count; at++) {
    const ipu = events.ipu[at];
    if (events.pipeline[at] !== view.pipeline || events.step[at] !== step || ipu < 0) continue;
    begin = Math.min(begin, events.begin[at]);
    end = Math.max(end, events.end[at]);
    if (!ofStages.includes(events.kind[at])) continue;
    firsts.set(ipu, Math.min(firsts.get(ipu) ?? Infinity, events.begin[at]));
    lasts.set(ipu, Math.max(lasts.get(ipu) ?? -Infinity, events.end[at]));
  }
  const full = Math.max(...firsts.values()), emptying = Math.min(...lasts.values());
  return full < emptying
    ? [["ramp-up", begin, full], ["main phase", full, emptying], ["ramp-down", emptying, end]]
    : [];
}

/** A time in microseconds, in words. */
function formatTime(time) {
  const size = Math.abs(time);
  const [value, unit] = size >= 1e6 ? [time / 1e6, "s"] : size >= 1e3 ? [time / 1e3, "ms"] : [time, "µs"];
  return `${value.toLocaleString("en", { maximumSignificantDigits: 6 })} ${unit}`;
}

/** The unit of an axis for numbers of bytes: its size and name. */
const unitOfBytes = (most) =>
  [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find((one) => most >= one[0]) ?? [1, "bytes"];

/** A number of bytes, in words. */
function formatBytes(number) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (number >= 1024 && place < units.length - 1) {
    number /= 1024;
    place++;
  }
  return `${number.toLocaleString("en", { maximumFractionDigits: place ? 2 : 0 })} ${units[place]}`;
}

/** What is to be known of an event, a line each, the first one as a title. */
function describeEvent(view, at, names) {
  const events = view.events;
  const kind = events.kinds[events.kind[at]];
  const stage = events.stage[at], pipeline = events.pipeline[at];
  const device = names[view.pipeline].device;
  const lines = [events.names[events.name[at]] || capitalise(kind)];
  if (pipeline >= 0 && names.length > 1) lines.push(names[pipeline].name);
  if (stage >= 0) {
    const name = names[pipeline].stages[stage].name;
    lines.push(new RegExp(`^stage ${stage}\\b`).test(name) ? name : `stage ${stage}: ${name}`);
  }
  if (events.batch[at] >= 0) lines.push(`micro-batch ${events.batch[at]}`);
  if (events.step[at] >= 0) lines.push(`step ${events.step[at]}`);
  if (events.source[at] >= 0) lines.push(`from ${device} ${events.source[at]} to ${device} ${events.ipu[at]}`);
  else if (events.ipu[at] >= 0) lines.push(`${device} ${events.ipu[at]}`);
  lines.push(`begins at ${formatTime(events.begin[at])}`);
  const isBounded = events.flags[at] & BOUNDED;
  lines.push(isBounded ? "its end was not seen" : `takes ${formatTime(events.end[at] - events.begin[at])}`);
  if (events.bytes[at]) lines.push(formatBytes(events.bytes[at]));
  if (events.flags[at] & SHARED) lines.push("shares a program: its times are estimates");
  return lines;
}
