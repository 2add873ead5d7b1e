/**
 * Starts infill-lsp and shows how it is doing.
 *
 * Knows where the server is, when to start it and which settings it gets. It does not know what a completion is: the
 * language client asks for completions, VS Code draws them, the server makes them.
 */

import { setTimeout as sleep } from 'node:timers/promises';
import * as vscode from 'vscode';
import { LanguageClient, State } from 'vscode-languageclient/node';

import { findServer } from './server';
import { serverSettings } from './settings';
import { StatusBar, type ServerStatus } from './status';

/** Milliseconds between two looks at the engine: while it comes up, and otherwise. */
const lookOften = 1_000;
const lookSeldom = 10_000;

const documents = [{ scheme: 'file' }, { scheme: 'untitled' }, { scheme: 'vscode-notebook-cell' }];

class Infill implements vscode.Disposable {
  private readonly log = vscode.window.createOutputChannel('Infill', { log: true });
  private readonly status = new StatusBar();
  private client: LanguageClient | undefined;
  /** Counts starts of the server, also those that the language client makes itself after a crash. */
  private turn = 0;
  /** Starts and stops follow one another: two restarts in a row must not race for `client`. */
  private last: Promise<void> = Promise.resolve();

  restart(): Promise<void> {
    this.last = this.last.then(async () => {
      await this.stop();
      await this.start();
    });
    return this.last;
  }

  showLog(): void {
    this.log.show();
  }

  /** Tells a running server that settings changed: it asks for them. */
  async settingsChanged(): Promise<void> {
    if (this.client?.isRunning()) {
      await this.client.sendNotification('workspace/didChangeConfiguration', { settings: {} });
    }
  }

  async dispose(): Promise<void> {
    await this.last;
    await this.stop();
    this.status.dispose();
    this.log.dispose();
  }

  private async start(): Promise<void> {
    const server = findServer();
    if (!server.found) {
      this.status.show({ state: 'error', message: server.problem });
      this.log.error(server.problem);
      void offerSetting(server.problem);
      return;
    }
    this.status.show({ state: 'starting' });
    const client = new LanguageClient(
      'infill',
      'Infill',
      { command: server.path },
      {
        documentSelector: documents,
        outputChannel: this.log,
        middleware: {
          workspace: {
            configuration: (params) =>
              params.items.map(({ section, scopeUri }) =>
                section === 'infill' ? serverSettings(scopeUri ? vscode.Uri.parse(scopeUri) : undefined) : null,
              ),
          },
        },
      },
    );
    this.client = client;
    client.onDidChangeState(({ newState }) => {
      if (newState === State.Running) {
        void this.follow(client);
      } else if (newState === State.Stopped && this.client === client) {
        this.status.show({ state: 'error', message: 'the server has stopped; the log says why' });
      }
    });
    try {
      await client.start();
      this.log.info(`started ${server.path}`);
    } catch (error) {
      const message = `${server.path} does not start: ${error instanceof Error ? error.message : String(error)}`;
      this.status.show({ state: 'error', message });
      this.log.error(message);
    }
  }

  /** Shows how the engine is doing, for as long as the server runs. */
  private async follow(client: LanguageClient): Promise<void> {
    const turn = ++this.turn;
    while (turn === this.turn && client.isRunning()) {
      try {
        const status = await client.sendRequest<ServerStatus>('infill/status');
        this.status.show(status);
        await sleep(['starting', 'fetching'].includes(status.state) ? lookOften : lookSeldom);
      } catch {
        return; // The server went away meanwhile: its change of state is shown.
      }
    }
  }

  private async stop(): Promise<void> {
    const client = this.client;
    this.client = undefined;
    // A client that never came up cannot be stopped, and has nothing left to stop.
    await client?.dispose().catch((error: unknown) => this.log.warn(String(error)));
  }
}

async function offerSetting(problem: string): Promise<void> {
  const open = 'Open setting';
  if ((await vscode.window.showErrorMessage(problem, open)) === open) {
    await vscode.commands.executeCommand('workbench.action.openSettings', 'infill.server.path');
  }
}

export function activate(context: vscode.ExtensionContext): void {
  const infill = new Infill();
  context.subscriptions.push(
    infill,
    vscode.commands.registerCommand('infill.restart', () => infill.restart()),
    vscode.commands.registerCommand('infill.showLog', () => infill.showLog()),
    vscode.workspace.onDidChangeConfiguration((event) => {
      if (event.affectsConfiguration('infill.server')) {
        void infill.restart();
      } else if (event.affectsConfiguration('infill')) {
        void infill.settingsChanged();
      }
    }),
    vscode.workspace.onDidGrantWorkspaceTrust(() => infill.restart()),
  );
  void infill.restart();
}
