// Drives one VS Code window as a person would: opens a file, types, looks at the ghost text, accepts, saves.
//
//   node vscode_journey.cjs JOURNEY      JOURNEY: JSON, the type `Journey` below
//
// Prints one line of JSON, the type `Seen`. Exits with 1 and the reason on stderr, and leaves `failed.png` in the
// artifacts folder, if something does not come in time. It judges nothing: what was seen is compared by its caller.
//
/** @typedef {{url: string, file: string, line: number, type: string, ghost: string, artifacts: string}} Journey */
/** @typedef {{ghost: string, status: string, tooltip: string}} Seen */

'use strict';

const { join } = require('node:path');
const { setTimeout: sleep } = require('node:timers/promises');
const { chromium } = require('playwright-core');

const LOAD_MS = 90_000;
const STEP_MS = 30_000;

/** @param {import('playwright-core').Page} page @param {Journey} journey @returns {Promise<Seen>} */
async function travel(page, journey) {
  const shoot = (name) => page.screenshot({ path: join(journey.artifacts, name) });

  await page.goto(journey.url, { waitUntil: 'domcontentloaded', timeout: LOAD_MS });
  await page.locator('.monaco-workbench').waitFor({ timeout: LOAD_MS });
  await page.getByRole('treeitem', { name: journey.file }).dblclick({ timeout: LOAD_MS });
  const editor = page.locator('.editor-instance .view-lines');
  await editor.waitFor();

  const item = page.locator('.statusbar-item[id$="infill.status"]');
  const tooltip = () => item.getByRole('button').getAttribute('aria-label');
  // A person types on until the engine is there; a journey that types once waits for it instead.
  await item.getByRole('button', { name: 'ready' }).waitFor({ timeout: LOAD_MS });

  await editor.click();
  await page.keyboard.press('Control+Home');
  for (let line = 1; line < journey.line; line++) {
    await page.keyboard.press('ArrowDown');
  }
  await page.keyboard.press('End');
  await page.keyboard.type(journey.type, { delay: 60 });
  const ghost = page.locator('.ghost-text-decoration, .ghost-text');
  // Ghost text is highlighted: one element a token, its spaces unbreakable.
  const drawn = async () => (await ghost.allInnerTexts()).join('').replaceAll('\u00a0', ' ');
  await until(async () => (await drawn()).includes(journey.ghost), `ghost text ${journey.ghost}`, drawn);
  const seen = {
    ghost: await drawn(),
    status: await item.innerText(),
    tooltip: (await tooltip()) ?? '',
  };
  await shoot('vscode-ghost.png');

  await page.keyboard.press('Tab');
  await ghost.first().waitFor({ state: 'detached', timeout: STEP_MS });
  const text = async () => (await editor.innerText()).replaceAll('\u00a0', ' ');
  await until(async () => (await text()).includes(journey.ghost), `accepted text ${journey.ghost}`, text);
  await page.keyboard.press('Control+s');
  await page.locator('.tab.active:not(.dirty)').waitFor({ timeout: STEP_MS });
  await shoot('vscode-accepted.png');
  return seen;
}

/** Waits until `condition` holds; after `STEP_MS`, throws what was awaited and what there is. */
async function until(condition, what, seen) {
  const deadline = Date.now() + STEP_MS;
  while (!(await condition())) {
    if (Date.now() > deadline) {
      throw new Error(`no ${what}; there is ${JSON.stringify(await seen())}`);
    }
    await sleep(20);
  }
}

async function main() {
  /** @type {Journey} */
  const journey = JSON.parse(process.argv[2]);
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
           '--disable-component-update', '--disable-sync'],
  });
  try {
    const page = await browser.newPage({ viewport: { width: 1100, height: 620 } });
    // The journey is between this machine and itself.
    await page.route('**/*', (route) =>
      new URL(route.request().url()).hostname === '127.0.0.1' ? route.continue() : route.abort());
    try {
      process.stdout.write(JSON.stringify(await travel(page, journey)) + '\n');
    } catch (error) {
      await page.screenshot({ path: join(journey.artifacts, 'failed.png') });
      throw error;
    }
  } finally {
    await browser.close();
  }
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
