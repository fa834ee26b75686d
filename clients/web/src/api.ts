// Calls to the gateway: JSON with the key of the reader, and one stream of events.

import { EventParser, type ServerEvent } from "./sse.ts";

/** An answer that is an error. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly reason: string,
    message: string,
  ) {
    super(message);
  }

  /** Whether the key is no good for this, now and later. */
  get isDenied(): boolean {
    return this.status === 401 || this.status === 403;
  }
}

/** What the network did, as opposed to the server. */
export class NetworkError extends Error {}

const API = "/page/api";
const SILENCE_MS = 40_000;

export type Query = Record<string, string | number | readonly string[]>;

function url(path: string, query: Query): string {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) parameters.append(name, String(each));
  }
  const text = parameters.toString();
  return `${API}${path}${text ? `?${text}` : ""}`;
}

async function send(path: string, query: Query, key: string, signal?: AbortSignal): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(url(path, query), {
      headers: { authorization: `Bearer ${key}` },
      ...(signal ? { signal } : {}),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new NetworkError("the server does not answer");
  }
  if (response.ok) return response;
  const body = (await response.json().catch(() => ({}))) as {
    error?: { reason?: string; message?: string };
  };
  throw new ApiError(
    response.status,
    body.error?.reason ?? `HTTP_${response.status}`,
    body.error?.message ?? `the server answered ${response.status}`,
  );
}

/** Returns the JSON of a resource. */
export async function get<T>(path: string, key: string, query: Query = {}, signal?: AbortSignal): Promise<T> {
  return (await (await send(path, query, key, signal)).json()) as T;
}

/** Hands on events until the stream ends, or says nothing for long. */
export async function listen(
  query: Query,
  key: string,
  signal: AbortSignal,
  onEvent: (event: ServerEvent) => void,
): Promise<void> {
  const response = await send("/events", query, key, signal);
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  if (!reader) return;
  const parser = new EventParser();
  for (;;) {
    let timer = 0;
    const silence = new Promise<never>((_, reject) => {
      timer = window.setTimeout(() => reject(new NetworkError("the server fell silent")), SILENCE_MS);
    });
    try {
      const { done, value } = await Promise.race([reader.read(), silence]);
      if (done) return;
      for (const event of parser.feed(value)) onEvent(event);
    } catch (error) {
      void reader.cancel().catch(() => undefined);
      throw signal.aborted || error instanceof NetworkError
        ? error
        : new NetworkError("the connection broke");
    } finally {
      window.clearTimeout(timer);
    }
  }
}
