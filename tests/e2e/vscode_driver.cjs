// One VS Code window in a real browser, driven from outside: reads a line of JSON a step from stdin, does it, and
// answers with a line of JSON, {"value": ...} or {"error": "..."}. It judges nothing: its caller compares.
//
//   node vscode_driver.cjs ARTIFACTS      ARTIFACTS: the folder for screenshots

'use strict';

const { join } = require('node:path');
const { createInterface } = require('node:readline');
const { chromium } = require('playwright-core');

const LOAD_MS = 90_000;
const STEP_MS = 30_000;
const GHOST = '.ghost-text-decoration, .ghost-text, .ghost-text-decoration-preview';
const EDITOR = '.editor-instance .view-lines, .notebookOverlay .cell.code .view-lines';

/** Rendered code has unbreakable spaces. */
const plain = (text) => text.replaceAll('\u00a0', ' ').replaceAll('\u200b', '');

/** What can be done, by name. */
const steps = {
  async open(page, { url }) {
    await page.goto(url, { waitUntil: 'domcontentloaded', timeout: LOAD_MS });
    await page.locator('.monaco-workbench').waitFor({ timeout: LOAD_MS });
    await page.locator('.statusbar-item[id$="infill.status"]').waitFor({ timeout: LOAD_MS });
  },
  async file(page, { name }) {
    await page.getByRole('treeitem', { name, exact: false }).first().dblclick({ timeout: LOAD_MS });
    await page.locator(`.tab.active[data-resource-name="${name}"]`).waitFor({ timeout: LOAD_MS });
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
    const found = label === undefined ? page.locator(selector) : page.locator(selector).filter({ hasText: label });
    await found.first().click({ timeout: STEP_MS });
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
    await page.locator('.tab.active:not(.dirty)').waitFor({ timeout: STEP_MS });
  },
  async shoot(page, { name }) {
    await page.screenshot({ path: join(process.argv[2], name) });
  },
  /** From now on, looks at each change of the page and each frame whether ghost text stands in it. */
  async watch(page) {
    await page.evaluate((ghost) => {
      const seen = { frames: 0, without: 0, on: true };
      window.infillSeen = seen;
      const look = () => {
        if (!seen.on) return;
        seen.frames += 1;
        const drawn = [...document.querySelectorAll(ghost)].map((one) => one.textContent).join('');
        if (drawn === '') seen.without += 1;
        requestAnimationFrame(look);
      };
      requestAnimationFrame(look);
    }, GHOST);
  },
  async watched(page) {
    return page.evaluate(() => {
      window.infillSeen.on = false;
      return window.infillSeen;
    });
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

async function main() {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
           '--disable-component-update', '--disable-sync'],
  });
  try {
    const page = await browser.newPage({ viewport: { width: 1100, height: 620 } });
    // The journey is between this machine and itself. What a webview loads has that name, and never leaves the page.
    await page.route('**/*', (route) => {
      const { hostname } = new URL(route.request().url());
      const isHere = hostname === '127.0.0.1' || hostname.endsWith('.vscode-resource.vscode-cdn.net');
      return isHere ? route.continue() : route.abort();
    });
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
