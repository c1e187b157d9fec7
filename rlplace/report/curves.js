// Curves of a report: axes, hover, zoom and smoothing by uPlot. Where scripts are off, the pictures stay.
(() => {
  "use strict";
  const figures = [...document.querySelectorAll("figure.curve")];
  const controls = document.querySelector(".controls");
  // Without the library, the pictures stay
  if (!figures.length || !controls || typeof uPlot === "undefined") return;
  const slider = controls.querySelector("input");
  const short = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 3});
  const long = new Intl.NumberFormat("en", {maximumSignificantDigits: 4});
  const near = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
  // The bounds of the vertical axis. uPlot itself draws values that are all 0 on an axis from 0 to 100.
  const rangeOf = (u, least, most) => {
    if (least === null) return [null, null];
    if (least === 0 && most === 0) return [0, 1];
    return uPlot.rangeNum(least, most, 0.1, true);
  };
  const steps = new Intl.NumberFormat("en", {maximumFractionDigits: 0});

  // Exponential moving average without the bias of its start; a gap stays a gap.
  const smoothed = (values, weight) => {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  };

  // Indices of values between two gaps: no line shows them. `undefined` is a value of another line alone.
  const lonely = (values) => {
    const at = [];
    for (let i = 0; i < values.length; i++) if (values[i] !== undefined) at.push(i);
    const blank = (k) => k < 0 || k >= at.length || values[at[k]] === null;
    return at.filter((i, k) => values[i] !== null && blank(k - 1) && blank(k + 1));
  };

  // The colours of the page, which follow its light or dark setting.
  const colour = (look, property) => {
    const probe = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    probe.innerHTML = `<path class="${look}"/>`;
    document.body.append(probe);
    const found = getComputedStyle(probe.firstChild)[property];
    probe.remove();
    return found;
  };

  const draw = (figure) => {
    const told = figure.told ??= JSON.parse(figure.querySelector("script").textContent);
    figure.plot?.destroy();
    const weight = Number(slider.value);
    const style = getComputedStyle(document.documentElement);
    const soft = style.getPropertyValue("--soft"), rule = style.getPropertyValue("--line");

    // Columns: each line as it is, pale where it is smoothed, and then its smoothed values.
    const series = [{}], tables = [], shown = [];
    for (const line of told.lines) {
      const stroke = colour(`s${line.colour}`, "stroke");
      const look = {stroke, width: 1.5, points: {show: true, size: 5, fill: stroke, filter: (u, at) => lonely(u.data[at])}};
      shown.push({at: series.length});
      if (weight > 0) {
        tables.push([line.x, line.y, smoothed(line.y, weight)]);
        series.push({...look, alpha: 0.3, width: 1}, {...look, width: 2});
      } else {
        tables.push([line.x, line.y]);
        series.push(look);
      }
    }

    const box = figure.querySelector(".plot");
    const readout = figure.querySelector(".readout");
    const last = figure.last ??= readout.textContent;
    const read = (u) => {
      const at = u.cursor.idx;
      if (at === null || at === undefined) { readout.textContent = last; return; }
      const texts = [];
      for (const line of shown) {
        const values = u.data[line.at];
        let i = at;
        while (i > 0 && values[i] === undefined) i--;
        const value = values[i] == null ? "none" : long.format(values[i]);
        texts.push(value);
      }
      // In the order of the key
      const place = box.clientWidth > 500 ? `${steps.format(u.data[0][at])} ${told.axis}` : near.format(u.data[0][at]);
      readout.textContent = `${texts.join(", ")} at ${place}`;
    };
    const axis = {stroke: soft, grid: {stroke: rule, width: 1}, ticks: {show: false}, font: "11px sans-serif"};
    const size = () => ({width: box.clientWidth, height: box.clientHeight});
    figure.classList.add("live");
    figure.plot = new uPlot({
      ...size(),
      legend: {show: false},
      cursor: {y: false, sync: {key: "report"}, drag: {x: true, y: false}},
      scales: {x: {time: false}, y: {range: rangeOf}},
      axes: [
        {...axis, size: 22, gap: 3, label: told.axis, labelSize: 15, labelGap: 0, labelFont: "11px sans-serif", space: 60,
          values: (u, at) => at.map((value) => short.format(value))},
        {...axis, size: 52, space: 34, values: (u, at) => at.map((value) => short.format(value))},
      ],
      series,
      hooks: {setCursor: [read]},
    }, uPlot.join(tables), box);
    figure.resize ??= new ResizeObserver(() => figure.plot.setSize(size()));
    figure.resize.observe(box);
  };

  const all = () => figures.forEach(draw);
  controls.hidden = false;
  slider.addEventListener("input", all);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
})();
