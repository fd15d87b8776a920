// Requests to the server, with the key of this tab.

const KEY = "axed.key";

export const getKey = () => sessionStorage.getItem(KEY);
export const dropKey = () => sessionStorage.removeItem(KEY);

/** Throws an error if no request can have the key. */
export function setKey(key) {
  new Headers({ Authorization: `Bearer ${key}` });
  sessionStorage.setItem(KEY, key);
}

/** Like `fetch`, for addresses of this server only. */
export function request(address, init = {}) {
  const url = new URL(address, location.href);
  if (url.origin !== location.origin) return Promise.reject(new Error("another origin"));
  const headers = new Headers(init.headers);
  const key = getKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  return fetch(url, { cache: "no-store", ...init, headers, credentials: "omit" });
}

/** Sends JSON to the API. Returns its response; throws an error with the server's explanation. */
export async function send(address, body, accept, signal) {
  let response;
  try {
    response = await request(address, {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: accept },
      body: JSON.stringify(body),
      signal,
    });
  } catch {
    throw new Error("The server cannot be reached. Try again.");
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Error(problem.detail || `The server answered ${response.status}.`);
}

/** Sends JSON to the API, and returns its answer. */
export async function post(address, body) {
  const response = await send(address, body, "application/json");
  return response.json();
}
