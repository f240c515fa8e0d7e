// Questions to the daemon. The token stays in this tab.

export function hasToken() {
  return Boolean(sessionStorage.getItem("token"));
}

export function keepToken(token) {
  sessionStorage.setItem("token", token);
}

// A link may bring a token; it does not stay in the address.
export function takeToken() {
  const found = /^#token=([\x21-\x7e]+)$/.exec(location.hash);
  if (!found) return;
  keepToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", "/#/");
}

export async function ask(path) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") || ""}` };
  const answer = await fetch(path, { headers, cache: "no-store" });
  const found = await answer.json();
  if (answer.ok) return found;
  throw Object.assign(new Error(found.error), { status: answer.status });
}
