/** When a server that went away is started again. Knows no editor and no process. */

/** Four restarts within three minutes: what fails oftener needs a person. */
const most = 4;
const windowMs = 3 * 60_000;
const firstDelayMs = 250;

export class Restarts {
  private times: number[] = [];

  /** Milliseconds to wait before the next restart at `now`; undefined where there is to be none. */
  next(now: number): number | undefined {
    this.times = this.times.filter((time) => now - time < windowMs);
    if (this.times.length >= most) {
      return undefined;
    }
    this.times.push(now);
    return firstDelayMs * 4 ** (this.times.length - 1);
  }

  /** A person started it by hand: what was before does not count. */
  forget(): void {
    this.times = [];
  }
}
