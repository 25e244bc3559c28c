// The API page: openapi.json as endpoints and types, inserted as text.
"use strict";

const BASE = location.origin + location.pathname.replace(/[^/]*$/, ""); // without user:token@, which fetch refuses

function make(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// A docstring: prose, and after "Attributes:" the fields, of which a line may describe several.
function parse(description = "", names = []) {
  const [prose, list = ""] = description.split(/^\s*Attributes:\s*$/m);
  const starts = [...list.matchAll(/(?:^|\s)(\w+): /g)].filter((match) => names.includes(match[1]));
  const fields = starts.map((match, i) => [match[1], list.slice(match.index + match[0].length, starts[i + 1]?.index)]);
  const flat = (text) => text.replace(/`/g, "").replace(/\s+/g, " ").trim();
  return { prose: flat(prose), fields: new Map(fields.map(([name, text]) => [name, flat(text)])) };
}

const nameOf = (reference) => reference.split("/").at(-1);

function typeOf(schema) { // strings and links to types
  if (schema.$ref) {
    const link = make("a", "", nameOf(schema.$ref));
    link.href = `#${nameOf(schema.$ref)}`;
    return [link];
  }
  const options = schema.anyOf ?? schema.oneOf;
  if (options) {
    const parts = options.filter((option) => option.type !== "null").map(typeOf);
    return parts.flatMap((part, i) => (i ? [" or ", ...part] : part));
  }
  if (schema.enum ?? schema.const) return [(schema.enum ?? [schema.const]).map((one) => `"${one}"`).join(" or ")];
  if (schema.type === "array") {
    const items = typeOf(schema.items ?? {});
    return ["list of ", ...(["string", "number", "integer"].includes(`${items}`) ? [`${items}s`] : items)];
  }
  if (schema.type === "object" && typeof schema.additionalProperties === "object") {
    return ["map to ", ...typeOf(schema.additionalProperties)];
  }
  return [schema.type ?? "anything"];
}

function limits(schema) {
  const [one = {}] = [schema, ...(schema.anyOf ?? [])].filter((option) => option.type && option.type !== "null");
  const number = (value) => value.toLocaleString("en");
  const range = (low, high, unit) => {
    if (low === undefined && high === undefined) return [];
    const words = high === undefined ? `at least ${number(low)}` : low ? `${number(low)} to ${number(high)}`
      : `at most ${number(high)}`;
    return [`${words}${unit}`];
  };
  const found = [...range(one.minimum, one.maximum, ""), ...range(one.minLength, one.maxLength, " characters"),
    ...range(one.minItems, one.maxItems, " entries"), ...range(one.minProperties, one.maxProperties, " names")];
  if (one.exclusiveMinimum !== undefined) found.push(`above ${number(one.exclusiveMinimum)}`);
  if (one.exclusiveMaximum !== undefined) found.push(`below ${number(one.exclusiveMaximum)}`);
  if (one.pattern) found.push(`matches ${one.pattern}`);
  if (schema.default !== undefined && schema.default !== null) found.push(`default ${JSON.stringify(schema.default)}`);
  return found.join(", ");
}

function fieldList(rows) {
  return make("dl", "fields", ...rows.flatMap(({ name, schema, required, text }) => [
    make("dt", "", make("code", "", name), ...(required ? [make("span", "needed", "required")] : [])),
    make("dd", "", make("span", "type", ...typeOf(schema), ...(limits(schema) ? [`, ${limits(schema)}`] : [])),
      ...(text ? [make("span", "what", text)] : [])),
  ]));
}

function schemaRows(schema) {
  const names = Object.keys(schema.properties ?? {});
  const described = parse(schema.description, names).fields;
  return names.map((name) => ({ name, schema: schema.properties[name], required: schema.required?.includes(name),
    text: schema.properties[name].description ?? described.get(name) }));
}

function schemaOf(content) { // of a body in JSON
  return Object.values(content ?? {})[0]?.schema;
}

// Fields of a body where it is sent; a list of them, or of a type that is told elsewhere, is named only.
function bodyFields(verb, schema, schemas) {
  const all = schemaRows(schemas[schema.$ref && nameOf(schema.$ref)] ?? schema);
  const rows = verb === "Send" ? all : all.map((row) => ({ ...row, required: false })); // what comes is there
  if (!rows.length) return [make("p", "", `${verb} `, ...typeOf(schema), ".")];
  return [make("h3", "verb", verb), fieldList(rows)];
}

function endpoint(method, path, operation, schemas) {
  const section = make("section", "endpoint", make("h2", "", make("code", "", `${method.toUpperCase()} ${path}`)));
  section.id = `${method}${path.replace(/\W+/g, "-")}`;
  section.append(make("p", "", parse(operation.description).prose || operation.summary || ""));
  const parameters = (operation.parameters ?? []).map((one) => (
    { name: one.name, schema: one.schema ?? {}, required: one.required, text: one.description ?? `in the ${one.in}` }));
  if (parameters.length) section.append(make("h3", "verb", "Parameters"), fieldList(parameters));
  const sent = schemaOf(operation.requestBody?.content);
  if (sent) section.append(...bodyFields("Send", sent, schemas));
  const answers = Object.entries(operation.responses ?? {});
  const good = answers.filter(([status]) => status.startsWith("2"));
  for (const schema of good.map(([, answer]) => schemaOf(answer.content)).filter((schema) => schema?.$ref)) {
    section.append(...bodyFields("Receive", schema, schemas));
  }
  const errors = answers.filter((answer) => !good.includes(answer));
  const told = errors.map(([status, answer]) => `${status} ${answer.description ?? ""}`).join(", ");
  const kinds = new Set(errors.map(([, answer]) => schemaOf(answer.content)?.$ref).filter(Boolean));
  const problem = kinds.size ? [": ", ...typeOf({ anyOf: [...kinds].map(($ref) => ({ $ref })) })] : [];
  if (told) section.append(make("p", "errors", `Or ${told}`, ...problem, "."));
  return section;
}

function type(name, schema) {
  const section = make("section", "endpoint", make("h3", "", make("code", "", name)));
  section.id = name;
  const { prose } = parse(schema.description);
  if (prose) section.append(make("p", "", prose));
  const rows = schemaRows(schema);
  section.append(rows.length ? fieldList(rows) : make("p", "", ...typeOf(schema)));
  return section;
}

async function start() {
  const main = document.getElementById("main"), error = document.getElementById("error");
  try {
    const response = await fetch(`${BASE}openapi.json`);
    const description = await response.json();
    if (!response.ok) throw new Error(description.detail ?? `The server answered ${response.status}.`);
    const methods = ["get", "post", "put", "patch", "delete"], schemas = description.components?.schemas ?? {};
    const all = Object.entries(description.paths).flatMap(([path, operations]) => methods
      .filter((method) => operations[method]).map((method) => endpoint(method, path, operations[method], schemas)));
    if (description.info?.description) main.append(make("p", "intro", description.info.description));
    main.append(...all, make("h2", "divider", "Types"));
    for (const told = new Set(); ;) { // types that something on the page links to, until none is missing
      const links = [...main.querySelectorAll("a")].map((link) => link.getAttribute("href").slice(1));
      const missing = links.find((name) => schemas[name] && !told.has(name));
      if (!missing) break;
      told.add(missing);
      main.append(type(missing, schemas[missing]));
    }
    if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
  } catch (problem) {
    error.textContent = `openapi.json could not be read: ${problem.message}`;
    error.hidden = false;
  }
  main.ariaBusy = "false";
}

start();
