// One VS Code window in a real browser, driven from outside: reads a line of JSON a step from stdin, does it, and
// answers with a line of JSON, {"value": ...} or {"error": "..."}. It judges nothing: its caller compares.
//
//   node vscode_driver.cjs ARTIFACTS      ARTIFACTS: the folder for screenshots

'use strict';

const { join } = require('node:path');
const { createInterface } = require('node:readline');
const { chromium } = require('playwright-core');

const patience = Number(process.env.INFILL_E2E_PATIENCE ?? '1');
const LOAD_MS = 90_000 * patience;
const STEP_MS = 30_000 * patience;
const GHOST = '.ghost-text-decoration, .ghost-text, .ghost-text-decoration-preview';
const EDITOR = '.editor-instance .view-lines, .notebookOverlay .cell.code .view-lines';

/** Rendered code has unbreakable spaces. */
const plain = (text) => text.replaceAll('\u00a0', ' ').replaceAll('\u200b', '');

let recording;

/** What can be done, by name. */
const steps = {
  async open(page, { url }) {
    await page.goto(url, { waitUntil: 'domcontentloaded', timeout: LOAD_MS });
    await steps.ready(page);
  },
  /** Away, and what `origin` keeps in the browser is forgotten, but for its programs. */
  async leave(page, { origin }) {
    await page.goto('about:blank', { timeout: LOAD_MS });
    const browser = await page.context().newCDPSession(page);
    await browser.send('Storage.clearDataForOrigin', { origin, storageTypes: 'cookies,indexeddb,local_storage' });
    await browser.detach();
  },
  async reload(page) {
    await page.reload({ waitUntil: 'domcontentloaded', timeout: LOAD_MS });
    await steps.ready(page);
  },
  async ready(page) {
    await page.locator('.monaco-workbench').waitFor({ timeout: LOAD_MS });
    await page.locator('.statusbar-item[id$="infill.status"]').waitFor({ timeout: LOAD_MS });
  },
  async file(page, { name }) {
    await page.getByRole('treeitem', { name, exact: false }).first().dblclick({ timeout: LOAD_MS });
    await steps.inFront(page, { name });
  },
  /** The tab is in front, and what is typed goes there. */
  async inFront(page, { name }) {
    await page.locator(`.tab.active[data-resource-name="${name}"]`).waitFor({ timeout: LOAD_MS });
    await page.locator('.editor-instance .monaco-editor.focused, .notebookOverlay').first().waitFor({ timeout: LOAD_MS });
  },
  /** Opens a file by its whole path: to find it by a part needs a search, which this VS Code may lack. */
  async quickOpen(page, { path }) {
    const name = path.split('/').pop();
    await page.keyboard.press('Control+p');
    const input = page.locator('.quick-input-widget input.input');
    await input.waitFor({ timeout: STEP_MS });
    await input.fill(path);
    await page.locator('.quick-input-widget .monaco-list-row.focused').filter({ hasText: name }).waitFor({ timeout: STEP_MS });
    await page.keyboard.press('Enter');
    await steps.inFront(page, { name });
  },
  async pause(page, { ms }) {
    await page.waitForTimeout(ms);
  },
  async clipboard(page) {
    return page.evaluate(() => navigator.clipboard.readText());
  },
  async type(page, { text, delay = 60 }) {
    await page.keyboard.type(text, { delay });
  },
  async press(page, { keys }) {
    for (const key of keys) {
      await page.keyboard.press(key);
    }
  },
  async click(page, { selector, label }) {
    const found = label == null ? page.locator(selector) : page.locator(selector).filter({ hasText: label });
    await found.first().click({ timeout: STEP_MS });
    await page.mouse.move(0, 0); // What pops up under a resting mouse would lie over the next thing to click.
  },
  /** A command of the palette, by its title. */
  async command(page, { title }) {
    await page.keyboard.press('F1');
    const input = page.locator('.quick-input-widget input.input');
    await input.waitFor({ timeout: STEP_MS });
    await input.fill(`>${title}`);
    // The list is drawn anew while it is filtered: a click could hit what stood there before.
    const chosen = page.locator('.quick-input-widget .monaco-list-row.focused').filter({ hasText: title });
    await chosen.waitFor({ timeout: STEP_MS });
    await page.keyboard.press('Enter');
    await input.waitFor({ state: 'hidden', timeout: STEP_MS });
  },
  async texts(page, { selector }) {
    return (await page.locator(selector).allInnerTexts()).map(plain);
  },
  async count(page, { selector }) {
    return page.locator(selector).count();
  },
  async ghost(page) {
    return plain((await page.locator(GHOST).allInnerTexts()).join(''));
  },
  async status(page) {
    const item = page.locator('.statusbar-item[id$="infill.status"]');
    return plain((await item.getByRole('button').first().getAttribute('aria-label', { timeout: STEP_MS })) ?? '');
  },
  /** Line and column as the status bar says them, such as "Ln 2, Col 5". */
  async cursor(page) {
    return plain(await page.locator('.statusbar-item[id="status.editor.selection"]').innerText());
  },
  async saved(page) {
    await page.keyboard.press('Control+s');
    await page.waitForFunction(() => document.querySelector('.tab.active.dirty') === null, undefined, { timeout: STEP_MS });
  },
  async shoot(page, { name }) {
    await page.screenshot({ path: join(process.argv[2], name) });
  },
  /** From now on, looks at each change of the page, and at each frame, whether ghost text stands in it. */
  async watch(page) {
    await page.evaluate((ghost) => {
      const seen = { frames: 0, changes: 0, without: 0, with: 0 };
      const look = (what) => {
        seen[what] += 1;
        const drawn = [...document.querySelectorAll(ghost)].map((one) => one.textContent).join('');
        seen[drawn === '' ? 'without' : 'with'] += 1;
      };
      const observer = new MutationObserver(() => look('changes'));
      observer.observe(document.body, { attributes: true, characterData: true, childList: true, subtree: true });
      let frame;
      const next = () => {
        look('frames');
        frame = requestAnimationFrame(next);
      };
      frame = requestAnimationFrame(next);
      window.infillWatch = () => {
        observer.disconnect();
        cancelAnimationFrame(frame);
        return seen;
      };
    }, GHOST);
  },
  async watched(page) {
    return page.evaluate(() => window.infillWatch());
  },
  /** Milliseconds from the event of a key to the first frame with ghost text; null where none comes in time. */
  async paint(page, { key, limit = 5000 * patience }) {
    await page.evaluate(([ghost, ms]) => {
      window.infillPaint = new Promise((resolve) => {
        let began;
        const drawn = () => [...document.querySelectorAll(ghost)].some((one) => one.textContent !== '');
        const next = () => {
          if (began !== undefined && drawn()) {
            resolve(performance.now() - began);
          } else if (began !== undefined && performance.now() - began > ms) {
            resolve(null);
          } else {
            requestAnimationFrame(next);
          }
        };
        document.addEventListener('keydown', (event) => { began = event.timeStamp; }, { capture: true, once: true });
        requestAnimationFrame(next);
      });
    }, [GHOST, limit]);
    await page.keyboard.press(key);
    return page.evaluate(() => window.infillPaint);
  },
  /** What the denoise view draws at each of its steps. */
  async drawnFrames(page) {
    for (const frame of page.frames()) {
      if (await frame.locator('#canvas').count().catch(() => 0)) {
        return frame.evaluate(() => {
          const [slider, canvas] = [document.getElementById('step'), document.getElementById('canvas')];
          const frames = [];
          for (let step = 0; step <= Number(slider.max); step++) {
            slider.value = String(step);
            slider.dispatchEvent(new Event('input'));
            const slots = [...canvas.children].map((one) => ({
              text: one.textContent, state: one.dataset.state, prob: Number(one.style.getPropertyValue('--sure')),
            }));
            frames.push({ step: Number(canvas.dataset.step), slots });
          }
          return frames;
        });
      }
    }
    return [];
  },
  /** From now on, a screenshot of a part of the page after the other, each with its time, those alone that show a change. */
  async record(page, { clip }) {
    const began = performance.now();
    recording = { on: true, shots: [] };
    recording.done = (async () => {
      while (recording.on && !page.isClosed()) {
        const ms = performance.now() - began;
        const png = await page.screenshot({ clip, caret: 'initial' }).catch(() => undefined);
        if (png === undefined) break; // The window was closed meanwhile.
        if (!recording.shots.at(-1)?.png.equals(png)) recording.shots.push({ ms, png });
      }
      recording.shots.push({ ms: performance.now() - began });
    })();
  },
  /** The first shot, and of each other one what is new in it: where that is, as a PNG in base64, and how many ms it stood. */
  async recorded(page) {
    recording.on = false;
    await recording.done;
    const pngs = recording.shots.slice(0, -1).map(({ png }) => png.toString('base64'));
    const workshop = await page.context().newPage();
    const parts = await workshop.evaluate(whatIsNew, pngs);
    await workshop.close();
    return parts.map((part, index) => ({ ...part, ms: recording.shots[index + 1].ms - recording.shots[index].ms }));
  },
  /** Confirms one of the edits that are to be, by what stands in its row, or all of a file by its name. */
  async confirm(page, { label }) {
    const boxes = page.locator('.monaco-list-row').filter({ hasText: label }).getByRole('checkbox');
    await boxes.first().click({ timeout: STEP_MS });
  },
  /** The text of a webview's frame. */
  async webview(page, { selector }) {
    for (const frame of page.frames()) {
      const found = frame.locator(selector);
      if (await found.count().catch(() => 0)) {
        return (await found.allInnerTexts()).map(plain);
      }
    }
    return [];
  },
};

/** In a page: the smallest rectangle of each picture that holds all that differs from the one before. */
async function whatIsNew(pngs) {
  const asPng = async (image, x, y, width, height) => {
    const canvas = new OffscreenCanvas(width, height);
    canvas.getContext('2d').putImageData(image, -x, -y);
    const bytes = new Uint8Array(await (await canvas.convertToBlob({ type: 'image/png' })).arrayBuffer());
    return btoa(bytes.reduce((text, byte) => text + String.fromCharCode(byte), ''));
  };
  const parts = [];
  let before;
  for (const png of pngs) {
    const bitmap = await createImageBitmap(await (await fetch(`data:image/png;base64,${png}`)).blob());
    const { width, height } = bitmap;
    const context = new OffscreenCanvas(width, height).getContext('2d');
    context.drawImage(bitmap, 0, 0);
    const image = context.getImageData(0, 0, width, height);
    const now = new Uint32Array(image.data.buffer);
    let [left, top, right, bottom] = before === undefined ? [0, 0, width - 1, height - 1] : [width, height, -1, -1];
    for (let at = 0; before !== undefined && at < now.length; at++) {
      if (now[at] !== before[at]) {
        const [x, y] = [at % width, Math.floor(at / width)];
        [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x), Math.max(bottom, y)];
      }
    }
    if (right < 0) [left, top, right, bottom] = [0, 0, 0, 0];
    const place = { x: left, y: top, width: right - left + 1, height: bottom - top + 1 };
    parts.push({ ...place, png: await asPng(image, place.x, place.y, place.width, place.height) });
    before = now;
  }
  return parts;
}

async function main() {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    // The journeys are between this machine and itself. Said here, since a page whose requests are routed caches nothing.
    args: ['--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1', '--no-sandbox', '--disable-gpu', '--disable-quic',
           '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
  try {
    const context = await browser.newContext({
      viewport: { width: 1100, height: 620 },
      permissions: ['clipboard-read', 'clipboard-write'],
    });
    const page = await context.newPage();
    for await (const line of createInterface({ input: process.stdin })) {
      const { step, ...given } = JSON.parse(line);
      let answer;
      try {
        answer = { value: (await steps[step](page, given)) ?? null };
      } catch (error) {
        await page.screenshot({ path: join(process.argv[2], 'failed.png') }).catch(() => undefined);
        answer = { error: String(error) };
      }
      process.stdout.write(JSON.stringify(answer) + '\n');
    }
  } finally {
    await browser.close();
  }
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
