"use strict";

const state = document.getElementById("state");
const keyForm = document.getElementById("key");
const sections = document.getElementById("sections");
const root = location.pathname.replace(/\/console\/?$/, "");

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? {Authorization: `Bearer ${key}`} : {};
}

function keepOnly(all) {
  for (const section of [...sections.children]) if (!(section.id in all)) section.remove();
}

function show(changed) {
  for (const [name, html] of Object.entries(changed)) {
    let section = document.getElementById(name);
    if (!section) {
      section = document.createElement("section");
      section.id = name;
      if (name === "trouble") section.setAttribute("role", "status");
      sections.insertBefore(section, name.startsWith("service-") ? document.getElementById("events") : null);
    }
    if (section.shown === html) continue;
    section.shown = html;
    replace(section, html);
    if (name === "try") choose();
  }
}

function replace(section, html) {
  const wide = () => [...section.querySelectorAll("[tabindex]")];
  const before = wide(), scrolled = before.map(each => each.scrollLeft), focused = before.indexOf(document.activeElement);
  section.innerHTML = html;
  wide().forEach((each, index) => { each.scrollLeft = scrolled[index] ?? 0; });
  wide()[focused]?.focus({preventScroll: true});
}

function named() {
  return location.hash.startsWith("#service-") ? decodeURIComponent(location.hash.slice("#service-".length)) : "";
}

let service = named(), leave = new AbortController();

async function follow() {
  leave = new AbortController();
  const stream = `${root}/console/stream?service=${encodeURIComponent(service)}`;
  const answer = await fetch(stream, {headers: headers(), signal: leave.signal});
  keyForm.hidden = answer.status !== 401 && answer.status !== 403;
  if (!answer.ok) throw new Error((await answer.json()).error);
  state.textContent = "live";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let all = true;
  for (let text = ""; ;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the gateway has ended the connection");
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const changed = JSON.parse(event.slice(6));
      if (all) keepOnly(changed);
      show(changed);
      if (all && service) document.getElementById(`service-${service}`)?.scrollIntoView();
      all = false;
    }
  }
}

async function followForEver() {
  for (;;) {
    try {
      await follow();
    } catch (error) {
      if (leave.signal.aborted) continue;
      state.textContent = `${error.message}; trying again`;
    }
    await new Promise(resolve => setTimeout(resolve, 1000));
  }
}

function choose() {
  const form = document.querySelector("#try form");
  const answers = form.service.selectedOptions[0]?.dataset.answers;
  for (const label of form.querySelectorAll("[class^=for-]")) label.hidden = !label.classList.contains(`for-${answers}`);
}

async function question(form) {
  const name = form.service.value;
  const answers = form.service.selectedOptions[0].dataset.answers;
  if (answers === "prompts") {
    const messages = [{role: "user", content: form.text.value}];
    return ["/v1/chat/completions", {model: form.adapter.value || name, messages, stream: true}];
  }
  if (answers === "texts") return [`/models/${name}`, {inputs: form.text.value}];
  const bytes = new Uint8Array(await form.image.files[0].arrayBuffer());
  return [`/models/${name}`, {inputs: btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join(""))}];
}

function way(answer) {
  const steps = answer.headers.get("Server-Timing")?.split(/, (?=\w+;dur=)/) ?? [];
  const told = step => step.replace(/;dur=([\d.]+)/, " $1 ms").replace(/;desc="(.*)"/, ": $1");
  return steps.map(step => `${told(step)}\n`).join("");
}

async function ask(form, out) {
  const [path, body] = await question(form);
  const began = performance.now();
  const passed = () => `${Math.round(performance.now() - began)} ms`;
  const sent = {"Content-Type": "application/json", "X-Pliant-Timing": "true", ...headers()};
  const answer = await fetch(root + path, {method: "POST", headers: sent, body: JSON.stringify(body)});
  if (!answer.ok || !body.stream) {
    out.textContent = `${answer.status} after ${passed()}\n${way(answer)}${JSON.stringify(await answer.json(), null, 2)}`;
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", said = "", first = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      first ||= passed();
      said += JSON.parse(line.slice(6)).choices?.[0]?.delta?.content ?? "";
      out.textContent = `first token after ${first}, ${passed()} in all\n${way(answer)}${said}`;
    }
  }
}

window.addEventListener("hashchange", () => {
  if (named() && document.getElementById(`service-${named()}`)) return;
  service = named();
  leave.abort();
});
document.addEventListener("change", event => { if (event.target.name === "service") choose(); });
document.addEventListener("submit", async event => {
  event.preventDefault();
  if (event.target === keyForm) {
    sessionStorage.setItem("key", keyForm.key.value);
    return;
  }
  const out = document.querySelector("#try pre");
  out.textContent = "…";
  try {
    await ask(event.target, out);
  } catch (error) {
    out.textContent = `no answer: ${error.message}`;
  }
});
followForEver();
