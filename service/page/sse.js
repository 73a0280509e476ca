// Server-sent events out of the bytes of a response.

/** The data of each event of `body`, a ReadableStream of bytes. Comments are left out. */
export async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let line = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return; // an event that has no blank line behind it is not complete
      line += value;
      // A \r at the end may be the first half of \r\n: it waits for what comes.
      const lines = line.split(/\r\n|\n|\r(?!$)/);
      line = lines.pop();
      for (const text of lines) {
        if (text.startsWith("data:")) data.push(text.slice(5).replace(/^ /, ""));
        else if (text === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
