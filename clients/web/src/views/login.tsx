// The way in: a key, kept until the tab is closed.

import { useState } from "preact/hooks";
import { logIn, loginError } from "../store.ts";

export function LoginView() {
  const [text, setText] = useState("");
  const [isBusy, setBusy] = useState(false);
  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    await logIn(text);
    setBusy(false);
  };
  return (
    <main class="login" id="main" tabIndex={-1}>
      <form onSubmit={(event) => void submit(event)}>
        <h1>
          <img src="/page/icon.svg" alt="" width="28" height="28" /> Tinsmith
        </h1>
        <label for="key">API key</label>
        <input
          id="key"
          type="password"
          autocomplete="off"
          spellcheck={false}
          placeholder="tsk_…"
          required
          value={text}
          aria-describedby="key-help"
          aria-invalid={loginError.value !== ""}
          onInput={(event) => setText(event.currentTarget.value)}
        />
        <button type="submit" disabled={isBusy}>
          {isBusy ? "Asking…" : "Log in"}
        </button>
        <p class="bad" role="alert">
          {loginError.value}
        </p>
        <p id="key-help" class="muted">
          <code>tinsmith up</code> prints one. A key with the role viewer is enough:{" "}
          <code>tinsmith keys create --for page --role viewer</code>. It is kept in this tab and forgotten with it.
        </p>
      </form>
    </main>
  );
}
