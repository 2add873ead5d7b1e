/** A panel that shows the canvas while it is denoised, from the frames that the server sends. Adds none of its own. */

import { randomBytes } from 'node:crypto';
import * as vscode from 'vscode';

import type { Frame } from './server';

export class DenoiseView implements vscode.Disposable {
  private panel: vscode.WebviewPanel | undefined;

  constructor(
    private readonly extension: vscode.Uri,
    /** Told when somebody begins or ends to look. */
    private readonly watch: (isWatching: boolean) => unknown,
  ) {}

  open(): void {
    if (this.panel !== undefined) {
      this.panel.reveal(undefined, true);
      return;
    }
    const media = vscode.Uri.joinPath(this.extension, 'media');
    const column = { viewColumn: vscode.ViewColumn.Beside, preserveFocus: true };
    const options = { enableScripts: true, retainContextWhenHidden: true, localResourceRoots: [media] };
    const panel = vscode.window.createWebviewPanel('infill.denoise', 'Infill: denoising', column, options);
    panel.onDidDispose(() => {
      this.panel = undefined;
      this.watch(false);
    });
    panel.webview.html = page(panel.webview, media);
    this.panel = panel;
    this.watch(true);
  }

  show({ step, ms, slots }: Frame): void {
    void this.panel?.webview.postMessage({ step, ms, slots });
  }

  dispose(): void {
    this.panel?.dispose();
  }
}

function page(webview: vscode.Webview, media: vscode.Uri): string {
  const nonce = randomBytes(16).toString('hex');
  const of = (name: string): string => webview.asWebviewUri(vscode.Uri.joinPath(media, name)).toString();
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src ${webview.cspSource}; script-src 'nonce-${nonce}'">
<link rel="stylesheet" href="${of('denoise.css')}">
<title>Denoising</title>
</head>
<body>
<h1>The canvas, step by step</h1>
<p id="says" role="status" aria-live="polite">Type in an editor: what the model writes is shown here as it is written.</p>
<label id="scrub" hidden>Step <input id="step" type="range" min="0" max="0" value="0"></label>
<pre id="canvas" tabindex="0" role="group" aria-label="Canvas"></pre>
<p id="legend">
<span class="slot" data-state="mask">· not written</span>
<span class="slot" data-state="proposed">proposed</span>
<span class="slot" data-state="committed">written</span>
The surer, the stronger the shade.
</p>
<script nonce="${nonce}" src="${of('denoise.js')}"></script>
</body>
</html>`;
}
