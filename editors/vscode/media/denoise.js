// Shows the frames of one request. A frame whose step is not beyond the last one's begins another request.
'use strict';

/** @typedef {{step: number, ms: number, slots: {text: string, prob: number, state: string}[]}} Frame */

const canvas = document.getElementById('canvas');
const says = document.getElementById('says');
const scrub = document.getElementById('scrub');
const slider = document.getElementById('step');

/** @type {Frame[]} */
let frames = [];
let timer;

window.addEventListener('message', ({ data }) => {
  const last = frames.at(-1);
  const follows = slider.valueAsNumber === frames.length - 1;
  if (last === undefined || data.step <= last.step) {
    frames = [data];
  } else {
    frames.push(data);
  }
  scrub.hidden = false;
  slider.max = String(frames.length - 1);
  // Somebody who looks at an earlier step is not taken away from it.
  if (follows || frames.length === 1) {
    slider.value = slider.max;
    draw();
  }
});

slider.addEventListener('input', draw);

function draw() {
  const frame = frames[slider.valueAsNumber];
  if (frame === undefined) {
    return;
  }
  canvas.replaceChildren(...frame.slots.map(slot));
  canvas.dataset.step = String(frame.step);
  slider.setAttribute('aria-valuetext', `step ${frame.step}, ${Math.round(frame.ms)} milliseconds`);
  // A screen reader is told once it is quiet, not at each of many steps.
  clearTimeout(timer);
  const written = frame.slots.filter(({ state }) => state === 'committed').length;
  const words = `Step ${frame.step}, ${Math.round(frame.ms)} ms: ${written} of ${frame.slots.length} slots written`;
  timer = setTimeout(() => { says.textContent = words; }, 300);
}

function slot({ text, prob, state }) {
  const one = document.createElement('span');
  one.className = 'slot';
  one.dataset.state = state;
  one.style.setProperty('--sure', String(prob));
  one.title = `${state}, ${Math.round(prob * 100)}%`;
  one.textContent = state === 'mask' ? '·' : text;
  return one;
}
