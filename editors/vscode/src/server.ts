/** The server's process, as the language client runs it: what it is told, and how often it is started again. */

import { setTimeout as sleep } from 'node:timers/promises';
import * as vscode from 'vscode';
import {
  CloseAction,
  ErrorAction,
  ExecuteCommandRequest,
  LanguageClient,
  MessageType,
  ShowMessageNotification,
  State,
  type ClientCapabilities,
  type Middleware,
  type ShowMessageParams,
  type StaticFeature,
} from 'vscode-languageclient/node';

import { sayProblem } from './problems';
import { Restarts } from './restarts';
import { serverSettings } from './settings';
import type { ServerStatus } from './status';
import type { Refresh } from './suggestions';

const documents = [{ scheme: 'file' }, { scheme: 'untitled' }, { scheme: 'vscode-notebook-cell' }];

/** How long a server may take to hear of a setting, and how often it is asked. */
const [patienceMs, pollMs] = [5_000, 100];

/** What `infill/canvas` brings: one step of the canvas. */
export interface Frame {
  textDocument: { uri: string };
  version: number;
  step: number;
  ms: number;
  slots: { text: string; prob: number; state: 'head' | 'committed' | 'proposed' | 'mask' }[];
}

/** Who hears what the server tells. */
export interface Listener {
  status(status: ServerStatus): void;
  canvas(frame: Frame): void;
  refresh(refresh: Refresh): void;
  /** The server has been told of changed settings. */
  configured(): void;
}

/** The protocol's part beyond LSP. */
const beyond: StaticFeature = {
  fillClientCapabilities: (capabilities: ClientCapabilities): void => {
    capabilities.experimental = { ...capabilities.experimental, infill: { status: true, refresh: true } };
  },
  initialize: () => undefined,
  getState: () => ({ kind: 'static' }),
  clear: () => undefined,
};

/** A client that only logs what goes wrong: it would show one fault in several messages, in its own words. */
class QuietClient extends LanguageClient {
  override error(message: string, data?: unknown): void {
    super.error(message, data, false);
  }
}

export class Server {
  private current: LanguageClient | undefined;
  private readonly restarts = new Restarts();
  private isWatching = false;
  /** Whether the current client's server has ever come up. */
  private hasRun = false;

  constructor(
    private readonly log: vscode.LogOutputChannel,
    private readonly listener: Listener,
    private readonly middleware: Middleware,
    /** What the extension sets itself. */
    private readonly own: () => object,
  ) {}

  get client(): LanguageClient | undefined {
    return this.current;
  }

  async start(program: string): Promise<void> {
    this.restarts.forget();
    const client = this.make(program);
    this.current = client;
    this.hasRun = false;
    client.onNotification(ShowMessageNotification.type, (message) => this.say(message));
    client.onNotification('infill/status', (status: ServerStatus) => this.listener.status(status));
    client.onNotification('infill/canvas', (frame: Frame) => this.listener.canvas(frame));
    client.onNotification('infill/refresh', (refresh: Refresh) => this.listener.refresh(refresh));
    client.onDidChangeState(({ newState }) => {
      if (this.current !== client) {
        return;
      }
      if (newState === State.Starting) {
        this.listener.status({ state: 'starting' });
      } else if (newState === State.Running) {
        this.hasRun = true;
        if (this.isWatching) {
          void this.watch(true); // A server that was started anew does not know of it.
        }
      }
    });
    try {
      await client.start();
      this.log.info(`started ${program}`);
    } catch (error) {
      this.failed(`${program} does not start: ${error instanceof Error ? error.message : String(error)}`);
    }
  }

  async stop(): Promise<void> {
    const client = this.current;
    this.current = undefined;
    // A client that never came up cannot be stopped, and has nothing left to stop.
    await client?.dispose().catch((error: unknown) => this.log.warn(String(error)));
  }

  /** Ends the engine, unless it runs elsewhere. None follows where the server is told that all is off. */
  async endEngine(): Promise<void> {
    if (vscode.workspace.getConfiguration('infill').get('engine.address') !== '') {
      return;
    }
    await this.settingsChanged();
    for (let ms = 0; ms < patienceMs && ![undefined, 'off'].includes((await this.status(undefined))?.state); ms += pollMs) {
      await sleep(pollMs);
    }
    await this.current?.sendRequest(ExecuteCommandRequest.type, { command: 'infill.server.restartEngine' }).catch((error: unknown) => {
      this.log.warn(`the engine does not stop: ${String(error)}`);
    });
  }

  /** Tells a running server that settings changed: it asks for them. */
  async settingsChanged(): Promise<void> {
    if (this.current?.isRunning()) {
      await this.current.sendNotification('workspace/didChangeConfiguration', { settings: {} });
    }
  }

  /** Whether each step of the canvas is wanted from now on. */
  async watch(isWatching: boolean): Promise<void> {
    this.isWatching = isWatching;
    if (this.current?.isRunning()) {
      await this.current.sendNotification('infill/watch', { canvas: isWatching });
    }
  }

  /** How things are in a document; undefined while no server is there to ask. */
  async status(document: vscode.TextDocument | undefined): Promise<ServerStatus | undefined> {
    const client = this.current;
    if (!client?.isRunning()) {
      return undefined;
    }
    const known = document !== undefined && vscode.languages.match(documents, document) > 0;
    const uri = known ? client.code2ProtocolConverter.asUri(document.uri) : undefined;
    try {
      return await client.sendRequest<ServerStatus>('infill/status', uri === undefined ? {} : { textDocument: { uri } });
    } catch {
      return undefined; // It went away meanwhile, which is shown.
    }
  }

  private make(program: string): LanguageClient {
    const client: LanguageClient = new QuietClient(
      'infill',
      'Infill',
      { command: program },
      {
        documentSelector: documents,
        outputChannel: this.log,
        errorHandler: {
          error: () => ({ action: ErrorAction.Continue, handled: true }),
          closed: () => this.closed(client),
        },
        initializationFailedHandler: () => false,
        middleware: {
          ...this.middleware,
          workspace: {
            configuration: (params) =>
              params.items.map(({ section, scopeUri }) =>
                section === 'infill' ? serverSettings(scopeUri ? vscode.Uri.parse(scopeUri) : undefined, this.own()) : null,
              ),
            // Instead of the client's own, which brings all settings with their defaults: the server asks for what is set.
            didChangeConfiguration: async () => {
              await this.settingsChanged();
              this.listener.configured();
            },
          },
        },
      },
    );
    client.registerFeature(beyond);
    return client;
  }

  private async closed(client: LanguageClient): Promise<{ action: CloseAction; handled: boolean }> {
    if (this.current !== client || !this.hasRun) {
      return { action: CloseAction.DoNotRestart, handled: true }; // Of one that never ran `start` tells.
    }
    const delay = this.restarts.next(Date.now());
    if (delay === undefined) {
      this.failed('The server has ended five times in three minutes, and is not started again.');
      return { action: CloseAction.DoNotRestart, handled: true };
    }
    this.log.warn(`the server has ended; it is started again in ${delay} ms`);
    this.listener.status({ state: 'starting' });
    await sleep(delay);
    // A person may have started another one meanwhile.
    return { action: this.current === client ? CloseAction.Restart : CloseAction.DoNotRestart, handled: true };
  }

  private failed(problem: string): void {
    this.log.error(problem);
    this.listener.status({ state: 'error', message: problem });
    void sayProblem(`Infill: ${problem}`, 'Start again', 'infill.restart');
  }

  /** What the server says to people; where something does not work, with what can be done. */
  private say({ type, message }: ShowMessageParams): void {
    if (type === MessageType.Error) {
      void sayProblem(message, 'Restart engine', 'infill.restartEngine');
    } else if (type === MessageType.Warning) {
      void vscode.window.showWarningMessage(message);
    } else {
      void vscode.window.showInformationMessage(message);
    }
  }
}
