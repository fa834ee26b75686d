// Server-sent events from a stream of text. `EventSource` sends no header, and so no key.

export interface ServerEvent {
  type: string;
  [field: string]: unknown;
}

/** Takes text in pieces, and returns the events that are whole. */
export class EventParser {
  private rest = "";

  feed(text: string): ServerEvent[] {
    const blocks = (this.rest + text).split("\n\n");
    this.rest = blocks.pop() ?? "";
    return blocks.flatMap((block) => {
      const lines = block.split("\n");
      const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length === 0) return [];
      const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
      return [{ type: name ?? "", ...(JSON.parse(data.join("\n")) as object) } as ServerEvent];
    });
  }
}
