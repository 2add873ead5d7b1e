/** One small item in the status bar. Knows how a state looks, not where it comes from. */

import * as vscode from 'vscode';

/** What the server answers to `infill/status`. */
export interface ServerStatus {
  state: 'stopped' | 'starting' | 'fetching' | 'ready' | 'error';
  /** One line for people; empty if there is nothing to say. */
  message?: string;
  /** 0 to 1 while fetching; null where unknown. */
  progress?: number | null;
  model?: string;
  /** Where the model runs, such as `cpu`; empty before it is ready. */
  device?: string;
}

const looks = {
  stopped: { icon: '$(sparkle)', says: 'the engine is not running; it starts when it is needed' },
  starting: { icon: '$(loading~spin)', says: 'starting' },
  fetching: { icon: '$(cloud-download)', says: 'fetching the model' },
  ready: { icon: '$(sparkle)', says: 'ready' },
  error: { icon: '$(warning)', says: 'not working' },
} as const;

export class StatusBar implements vscode.Disposable {
  private readonly item = vscode.window.createStatusBarItem('infill.status', vscode.StatusBarAlignment.Right, 100);

  constructor() {
    this.item.name = 'Infill';
    this.item.command = 'infill.showLog';
  }

  show({ state, message, progress, model, device }: ServerStatus): void {
    const { icon, says } = looks[state];
    const percent = typeof progress === 'number' && state === 'fetching' ? ` ${Math.floor(progress * 100)}%` : '';
    const where = state === 'ready' ? [model, device].filter(Boolean).join(' on ') : '';
    this.item.text = `${icon} Infill${percent}`;
    this.item.tooltip = ['Infill', message || says, where].filter(Boolean).join(': ');
    this.item.backgroundColor =
      state === 'error' ? new vscode.ThemeColor('statusBarItem.warningBackground') : undefined;
    this.item.show();
  }

  dispose(): void {
    this.item.dispose();
  }
}
