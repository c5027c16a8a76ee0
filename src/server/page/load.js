// The slider of `serve --demo-load`: requests that the server makes for itself. It is there where the server offers it.
(() => {
  const box = document.createElement("div"), label = document.createElement("label"), slider = document.createElement("input"), text = document.createElement("output");
  box.hidden = true;
  Object.assign(slider, {type: "range", min: 0, max: 100, value: 0, id: "demo_load"});
  label.append("Demo load ", slider, " ", text);
  box.append(label);
  $("why_title").before(box);
  // Logarithmic: 0, then 0.1 to 100 requests a second.
  const rateOf = value => value === 0 ? 0 : 0.1 * Math.pow(1000, (value - 1) / 99);
  const valueOf = rate => rate <= 0 ? 0 : Math.round(1 + 99 * Math.log(rate / 0.1) / Math.log(1000));
  const show = rate => { text.textContent = (rate < 10 ? rate.toFixed(1) : rate.toFixed(0)) + " requests/s"; };
  let dragging = 0;
  slider.addEventListener("input", async () => {
    const rate = rateOf(Number(slider.value));
    show(rate);
    dragging = Date.now();
    try {
      await call("/nestedfp/demo-load?rate=" + rate.toFixed(3), {method: "POST", headers: headers()});
    } catch (error) { text.textContent = error.message; }
  });
  // Told of each answer of the timeline.
  window.showDemoLoad = rate => {
    box.hidden = rate === null || rate === undefined;
    if (box.hidden || Date.now() - dragging < 2000) return;
    slider.value = valueOf(rate);
    show(rate);
  };
})();
