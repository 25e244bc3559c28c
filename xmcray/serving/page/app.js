// The search page. It asks the server it came from, and shows what it gets as text, never as markup.
"use strict";

const BASE = location.origin + location.pathname.replace(/[^/]*$/, ""); // without user:token@, which fetch refuses
const DEBOUNCE_MS = 150;
const SIZES = [5, 10, 20, 50, 100];
const VOTERS = 8; // the rest is summed up
const byId = (id) => document.getElementById(id);
const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const ms = (time) => `${time < 10 ? time.toFixed(1) : Math.round(time)} ms`;

const box = byId("query"), form = byId("form"), sizes = byId("k"), attribute = byId("attribute"), value = byId("value");
const least = byId("least"), compare = byId("compare"), help = byId("help"), singleKeys = byId("single-keys");

let models = [];
let settings = { query: "", names: [], k: 10, attribute: "", value: "", least: 0 }; // `names` are one or two models
const kinds = new Map(); // attribute -> its JavaScript type, learned from answers
const answerOf = new WeakMap(); // <li> -> the answer it shows
let timer = 0;
let running = null; // AbortController of the search on its way

// --- talking to the server

async function ask(path, body, signal) {
  const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let response, text;
  try {
    response = await fetch(BASE + path, { ...(body && post), signal });
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer; check that it runs, then press Enter in the search box.");
  }
  let answer = null;
  try { answer = JSON.parse(text); } catch { /* told below */ }
  if (response.ok && answer) return answer;
  const status = `${response.status} ${response.statusText}`.trim();
  throw new Error(sentence(answer?.detail || answer?.title || `The server answered ${status}, which is no JSON.`));
}

function sentence(text) {
  const start = /^[a-z]+ /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(start) ? start : `${start}.`;
}

// One of several values (a, b), or a range (1..9, >= 3). What looks like a number is one, unless it stands in quotes or
// the attribute is known to be a text.
function condition(text, kind) {
  const number = "([-+]?(?:\\d+\\.?\\d*|\\.\\d+)(?:e[-+]?\\d+)?)";
  const span = text.match(new RegExp(`^${number}?\\s*\\.\\.\\s*${number}?$`, "i"));
  if (span && (span[1] || span[2]) && kind !== "string") {
    return { ...(span[1] && { gte: +span[1] }), ...(span[2] && { lte: +span[2] }) };
  }
  const bound = text.match(new RegExp(`^([<>]=?)\\s*${number}$`, "i"));
  if (bound && kind !== "string") return { [{ "<": "lt", "<=": "lte", ">": "gt", ">=": "gte" }[bound[1]]]: +bound[2] };
  const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
  return parts.map((part) => {
    if (/^".*"$/.test(part)) return part.slice(1, -1);
    if (kind === "string") return part;
    if (part === "true" || part === "false") return part === "true";
    return Number.isFinite(+part) ? +part : part;
  });
}

const PARTS = {
  labels: "label vectors",
  memory: "training queries with near vectors",
  words: "training queries with similar words",
  texts: "the words of the label’s own text",
};
const votes = (model) => model.predictor === "memory";
const explains = (model) => votes(model) || model.predictor === "fused";
const filtered = () => settings.attribute !== "" && settings.value.trim() !== "";

function request(model) {
  const body = { texts: [settings.query], k: settings.k, model: model.model, fields: ["uid", "text", "score"] };
  if (explains(model)) body.explain = true;
  if (model.calibrated) body.fields.push("probability");
  if (model.calibrated && settings.least) body.min_probability = settings.least;
  if (model.attributes.length) body.fields.push("attributes");
  if (filtered()) {
    const { attribute: name, value: text } = settings;
    body.filter = { attributes: { [name]: condition(text.trim(), kinds.get(name)) } };
  }
  return body;
}

async function search() {
  clearTimeout(timer);
  running?.abort();
  if (!models.length) return start();
  writeHash();
  const { signal } = (running = new AbortController());
  const asked = settings.query.trim() !== "";
  byId("welcome").hidden = asked;
  byId("sides").hidden = !asked;
  if (!asked) {
    sides.forEach(clear);
    return say("");
  }
  const shown = sides.slice(0, settings.names.length);
  for (const side of shown) side.root.ariaBusy = "true";
  await Promise.all(shown.map(async (side) => {
    try {
      const since = performance.now();
      const answer = await ask("v1/search", request(side.model), signal);
      if (!signal.aborted) show(side, answer, performance.now() - since);
    } catch (error) {
      if (!signal.aborted) fail(side, error);
    }
    if (!signal.aborted) side.root.ariaBusy = "false";
  }));
  if (signal.aborted) return undefined; // a later search will speak
  if (shown.length === 2) markShared(...shown);
  return say(shown.map(summary).join(" "));
}

// --- the two sides

const sides = [0, 1].map((number) => {
  const root = byId("side-template").content.cloneNode(true).querySelector(".side");
  const part = (name) => root.querySelector(name);
  const side = { root, name: part(".name"), select: part(".model"), meta: part(".meta"), error: part(".error"),
    note: part(".note"), list: part(".answers"), answers: [], model: null };
  side.select.addEventListener("change", () => {
    settings.names[number] = side.select.value;
    arrange();
    search();
  });
  byId("sides").append(root);
  return side;
});

function clear(side) {
  side.answers = [];
  side.list.replaceChildren();
  side.meta.textContent = "";
  side.note.hidden = side.error.hidden = true;
}

function fail(side, error) {
  clear(side);
  side.error.textContent = error.message;
  side.error.hidden = false;
}

function show(side, response, roundTrip) {
  const { answers, truncated } = response.results[0];
  for (const [name, fact] of answers.flatMap((answer) => Object.entries(answer.attributes ?? {}))) {
    kinds.set(name, typeof fact);
  }
  side.error.hidden = true;
  side.answers = answers;
  const version = element("code", "", response.version.slice(0, 8));
  version.title = `Bundle ${response.version}`;
  const times = element("span", "times", `${ms(response.took_ms)} on the server, ${ms(roundTrip)} in all`);
  side.meta.replaceChildren("version ", version, ` · label log ${response.label_log} · `, times);
  side.note.textContent = remarks(side.model, answers.length, truncated);
  side.note.hidden = !side.note.textContent;
  const parts = shares(answers), items = [...side.list.children];
  const held = items.indexOf(document.activeElement.closest(".answer")); // whoever is on the third answer stays there
  side.list.replaceChildren(...answers.map((answer, i) => row(side, response, answer, i, parts[i])));
  if (held >= 0 && answers.length) focusAnswer(side.list.children[Math.min(held, answers.length - 1)]);
}

function passing(model) {
  const passed = [];
  if (filtered()) passed.push("passed the filter");
  if (model.calibrated && settings.least) passed.push(`reached a probability of ${percent(settings.least)}`);
  return passed.join(" and ") || "found";
}

function remarks(model, found, truncated) {
  const notes = [];
  const some = found ? `Only ${count(found, "label")}` : "No label";
  if (found < settings.k) notes.push(`${some} ${passing(model)}.`);
  if (truncated) notes.push(`The model reads ${model.max_len} tokens; the end of this longer query was left out.`);
  return notes.join(" ");
}

// Probabilities, or scores as parts of the best one. Scores below zero have no such part: then the bars begin at the
// lowest score.
function shares(answers) {
  if (answers.some((answer) => answer.probability !== undefined)) return answers.map((answer) => answer.probability ?? 0);
  const scores = answers.filter((answer) => !answer.completed).map((answer) => answer.score);
  const best = Math.max(...scores), low = Math.min(0, ...scores);
  return answers.map((answer) => (answer.completed ? 0 : best > low ? (answer.score - low) / (best - low) : 1));
}

function percent(probability) {
  return probability > 0 && probability < 0.0005 ? "< 0.1 %" : `${(100 * probability).toFixed(1)} %`;
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

// A uid such as scipy.signal.find_peaks may be broken after its dots.
function breakable(uid) {
  return uid.split(/(?<=[._/:-])/).flatMap((part) => [part, document.createElement("wbr")]);
}

function row(side, response, answer, i, share) {
  const { model } = side;
  const item = byId("answer-template").content.cloneNode(true).querySelector(".answer");
  const part = (name) => item.querySelector(name);
  const text = answer.text || answer.uid;
  const named = text === answer.uid || text.startsWith(`${answer.uid} `); // begins with the uid: once is enough
  part(".rank").textContent = i + 1;
  part(".title").append(...(named ? breakable(answer.uid) : [text]));
  part(".text").append(...(named ? [text.slice(answer.uid.length + 1)] : breakable(answer.uid)));
  part(named ? ".title" : ".text").classList.add("uid");
  const facts = Object.entries(answer.attributes ?? {});
  part(".facts").textContent = facts.map(([name, fact]) => `${name} ${fact}`).join(" · ");
  part(".part").textContent = answer.parts ? `mostly ${mainPart(answer.parts)}` : "";
  const shares = votes(model) && answer.score >= 0 && answer.score <= 1;
  const score = shares ? percent(answer.score) : answer.score.toFixed(3);
  const known = answer.probability !== undefined;
  part(".number").textContent = known ? percent(answer.probability) : answer.completed ? "no vote" : score;
  part(".number").title = known ? `Probability that this label is relevant; score ${answer.score.toFixed(3)}` : "";
  part(".bar > span").style.width = `${100 * share}%`; // set by script, which the CSP allows
  item.tabIndex = i === 0 ? 0 : -1; // one stop of the Tab key for the whole list
  const why = part(".why");
  why.hidden = !answer.voters;
  why.setAttribute("aria-label", `Why ${answer.uid}?`);
  why.addEventListener("click", () => toggle(item));
  part(".label").addEventListener("click", (event) => {
    if (!event.target.closest("button") && getSelection().isCollapsed) toggle(item);
  });
  part(".verdict").hidden = !model.feedback;
  for (const button of part(".verdict").children) {
    button.setAttribute("aria-label", `${button.value} ${answer.uid}`);
    button.addEventListener("click", () => judge(side, response, answer, button));
  }
  answerOf.set(item, answer);
  return item;
}

// Tells the server what the user thinks of an answer; the button is pressed once the server has it on its disk.
async function judge(side, response, answer, button) {
  const body = { request_id: response.request_id, label: answer.uid, event: button.value, model: response.model };
  try {
    await ask("v1/feedback", body);
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", other === button);
    say(`${answer.uid}: ${button.value}ed.`);
  } catch (error) {
    side.note.textContent = error.message;
    side.note.hidden = false;
    say(error.message);
  }
}

// A bundle of several trained models names its parts MODEL.PART.
function partName(name) {
  const dot = name.lastIndexOf(".");
  const kind = PARTS[name.slice(dot + 1)] ?? name;
  return dot < 0 ? kind : `${kind} (${name.slice(0, dot)})`;
}

function mainPart(parts) {
  return partName(Object.entries(parts).reduce((best, part) => (part[1] > best[1] ? part : best))[0]);
}

function explain(place, answer) {
  const all = answer.voters, sum = all.reduce((total, voter) => total + voter.weight, 0);
  place.querySelector("p").textContent = all.length
    ? `${count(all.length, "training query", "training queries")} voted for this label:`
    : "No training query voted for this label" + (answer.completed ? "; it fills up the list." : ".");
  const voter = (weight, name, text) => {
    const line = element("li", "", "");
    const uid = element("span", "uid", "");
    uid.append(...breakable(name));
    // Votes of a memory are shares of a probability, those of a fused bundle parts of a sum.
    const share = answer.parts ? weight.toFixed(3) : percent(weight);
    line.append(element("span", "weight", share), ...(name ? [uid, " "] : []), element("span", "", text));
    return line;
  };
  const lines = all.slice(0, VOTERS).map((one) => voter(one.weight, one.uid, one.text));
  const rest = all.slice(VOTERS).reduce((total, one) => total + one.weight, 0);
  if (all.length > VOTERS) lines.push(voter(rest, "", `${all.length - VOTERS} more, together`));
  const own = answer.score - sum;
  const parts = Object.entries(answer.parts ?? {});
  lines.unshift(...parts.map(([name, gain]) => voter(gain, "", `from ${partName(name)}`)));
  if (!answer.parts && own > 5e-5 && answer.score <= 1) lines.push(voter(own, "", "the label’s own text"));
  place.querySelector("ul").replaceChildren(...lines);
}

function toggle(item) {
  const open = item.classList.toggle("open"); // also shows a long text in full
  const voters = item.querySelector(".voters"), answer = answerOf.get(item);
  item.querySelector(".why").setAttribute("aria-expanded", open);
  voters.hidden = !(open && answer.voters);
  if (!voters.hidden) explain(voters, answer);
}

function markShared(left, right) {
  for (const [side, other] of [[left, right], [right, left]]) {
    const places = new Map(other.answers.map((answer, i) => [answer.uid, i + 1]));
    const where = side === left ? "right" : "left";
    side.answers.forEach((answer, i) => {
      const place = places.get(answer.uid), item = side.list.children[i];
      if (!other.error.hidden || place === i + 1) return;
      const [kind, text] = place ? ["also", `no. ${place} on the ${where}`] : ["only", "only here"];
      item.querySelector(".foot").prepend(element("span", kind, text));
    });
  }
}

function summary(side) {
  if (!side.error.hidden) return ""; // an alert has said so
  const best = side.answers.length ? `, the best is ${side.answers[0].uid}.` : ".";
  return `${count(side.answers.length, "answer")} from ${side.model.model}${best}`;
}

function say(text) { byId("status").textContent = text; }

// --- settings: the address, the controls and the sides show the same

function readHash() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const known = (name) => models.some((model) => model.model === name);
  const k = Number(hash.get("k"));
  const first = known(hash.get("model")) ? hash.get("model") : models[0].model;
  settings = { query: hash.get("q") ?? "", names: known(hash.get("with")) ? [first, hash.get("with")] : [first],
    k: Number.isInteger(k) && k >= 1 && k <= 1000 ? k : 10,
    attribute: hash.get("where") ?? "", value: hash.get("is") ?? "", least: probability(hash.get("least")) };
}

function probability(text) {
  const value = Number(text);
  return value > 0 && value <= 1 ? value : 0;
}

function writeHash() {
  const { query, names, k } = settings;
  const hash = new URLSearchParams({ q: query, model: names[0], ...(names[1] && { with: names[1] }), k });
  if (settings.attribute) { hash.set("where", settings.attribute); hash.set("is", settings.value); }
  if (settings.least) hash.set("least", settings.least);
  history.replaceState(null, "", `#${hash}`);
  document.title = query.trim() ? `${query.trim()} · xmcray` : "xmcray";
}

function options(select, pairs, chosen) {
  select.replaceChildren(...pairs.map(([name, text]) => new Option(text, name, false, name === chosen)));
}

function arrange() {
  const chosen = settings.names.map((name) => models.find((model) => model.model === name));
  const common = chosen[0].attributes.filter((name) => chosen.every((model) => model.attributes.includes(name)));
  if (!common.includes(settings.attribute)) settings.attribute = settings.value = "";
  if (box.value !== settings.query) box.value = settings.query;
  const offered = [...new Set([...SIZES, settings.k])].sort((a, b) => a - b);
  options(sizes, offered.map((k) => [`${k}`, `${k}`]), `${settings.k}`);
  byId("filter").hidden = !common.length;
  options(attribute, [["", "none"], ...common.map((name) => [name, name])], settings.attribute);
  value.hidden = !settings.attribute;
  if (value.value !== settings.value) value.value = settings.value;
  byId("least-control").hidden = !chosen.some((model) => model.calibrated);
  least.value = settings.least;
  showLeast();
  compare.hidden = models.length < 2;
  compare.setAttribute("aria-pressed", chosen.length === 2);
  document.body.classList.toggle("comparing", chosen.length === 2);
  sides.forEach((side, i) => {
    if (side.model !== chosen[i]) clear(side);
    side.root.hidden = !chosen[i];
    side.model = chosen[i];
    if (!chosen[i]) return;
    side.root.ariaLabel = `${chosen.length === 2 ? ["Left", "Right"][i] : "Answers"}: ${chosen[i].model}`;
    side.name.textContent = chosen[i].model;
    side.name.hidden = models.length > 1;
    side.select.hidden = models.length === 1;
    side.select.ariaLabel = chosen.length === 2 ? ["Left model", "Right model"][i] : "Model";
    options(side.select, models.map((model) => [model.model, model.model]), chosen[i].model);
  });
  const what = chosen.map((model) => `the ${count(model.num_labels, "label")} of ${model.model}`).join(" and ");
  byId("welcome").textContent = `Start typing, and ${what} are ranked as you go.`;
}

function showLeast() {
  byId("least-shown").textContent = settings.least ? percent(settings.least) : "any probability";
}

function toggleCompare() {
  if (models.length < 2) return;
  const other = models.find((model) => model.model !== settings.names[0]);
  settings.names = settings.names.length === 2 ? [settings.names[0]] : [settings.names[0], other.model];
  arrange();
  search();
}

function restore() {
  if (!models.length) return start();
  readHash();
  arrange();
  return search();
}

async function start() {
  const error = byId("error");
  try {
    models = (await ask("v1/models")).models;
    if (!models.length) throw new Error("The server has no model; start it with a bundle.");
  } catch (problem) {
    error.textContent = problem.message;
    error.hidden = false;
    return;
  }
  error.hidden = true;
  const typed = box.value;
  readHash();
  if (typed) settings.query = typed;
  arrange();
  await search();
}

// --- events

function change(values, wait = 0) {
  Object.assign(settings, values);
  clearTimeout(timer);
  running?.abort(); // its answer is stale already
  if (wait) timer = setTimeout(search, wait);
  else search();
}

form.addEventListener("submit", (event) => { event.preventDefault(); change({ query: box.value }); });
box.addEventListener("input", () => change({ query: box.value }, DEBOUNCE_MS));
sizes.addEventListener("change", () => change({ k: Number(sizes.value) }));
value.addEventListener("input", () => change({ value: value.value }, DEBOUNCE_MS));
least.addEventListener("input", () => {
  settings.least = Number(least.value);
  showLeast();
  change({}, DEBOUNCE_MS);
});
attribute.addEventListener("change", () => {
  const had = filtered();
  settings.attribute = attribute.value;
  settings.value = "";
  arrange();
  if (settings.attribute) value.focus();
  if (had) search(); else writeHash();
});
compare.addEventListener("click", toggleCompare);
window.addEventListener("hashchange", restore);

byId("help-button").addEventListener("click", () => help.showModal());
byId("help-close").addEventListener("click", () => help.close());
help.addEventListener("click", (event) => { if (event.target === help) help.close(); }); // beside the box
try { singleKeys.checked = localStorage.getItem("single-keys") !== "off"; } catch { /* storage is switched off */ }
singleKeys.addEventListener("change", () => {
  try { localStorage.setItem("single-keys", singleKeys.checked ? "on" : "off"); } catch { /* for this visit only */ }
});

function focusAnswer(item) {
  for (const other of item.parentElement.children) other.tabIndex = -1;
  item.tabIndex = 0;
  item.focus();
}

function walk(event, item) {
  const list = item.parentElement, items = [...list.children], i = items.indexOf(item);
  const beside = settings.names.length === 2 ? sides.map((side) => side.list) : [];
  const across = { ArrowLeft: beside[0], ArrowRight: beside[1] }[event.key];
  if (event.key === "Enter" && event.target === item) toggle(item);
  else if (event.key === "ArrowDown") focusAnswer(items[Math.min(i + 1, items.length - 1)]);
  else if (event.key === "ArrowUp") i ? focusAnswer(items[i - 1]) : box.focus();
  else if (event.key === "Home") focusAnswer(items[0]);
  else if (event.key === "End") focusAnswer(items.at(-1));
  else if (event.key === "Escape") box.focus();
  else if (across?.children.length) focusAnswer(across.children[Math.min(i, across.children.length - 1)]);
  else return;
  event.preventDefault();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || help.open) return;
  const item = event.target.closest?.(".answer");
  if (item) walk(event, item);
  if (event.target === box && event.key === "ArrowDown") {
    const first = document.querySelector(".side:not([hidden]) .answer");
    if (first) { event.preventDefault(); focusAnswer(first); }
  }
  if (event.target.matches?.("input, select, textarea") || event.defaultPrevented || !singleKeys.checked) return;
  if (event.key === "/") { event.preventDefault(); box.select(); box.focus(); }
  else if (event.key === "c") toggleCompare();
  else if (event.key === "?") help.showModal();
});

start();
