// Keeps the figures moving, and asks before anything is changed. Without it the page still tells and its forms still work.
"use strict";
(() => {
  const result = document.getElementById("result");
  const connection = document.getElementById("connection");
  const pause = document.getElementById("pause");
  const dialog = document.getElementById("question");
  const waiting = {};
  let events = null;

  function say(text) {
    connection.textContent = text;
  }

  // What somebody works in holds still until the focus is elsewhere; all does while a question is open, as the focus returns to where it was.
  function show(sections) {
    for (const [name, html] of Object.entries(sections)) {
      const body = document.querySelector(`[data-section="${name}"]`);
      if (body === null || dialog.open || body.contains(document.activeElement)) {
        waiting[name] = html;
        continue;
      }
      const left = [...body.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
      body.innerHTML = html;
      body.querySelectorAll(".scroll").forEach((one, i) => { one.scrollLeft = left[i] || 0; });
      delete waiting[name];
    }
  }
  document.addEventListener("focusout", () => setTimeout(() => show({ ...waiting }), 0));

  function connect() {
    events = new EventSource("/tiered/events");
    events.addEventListener("sections", (event) => { say("live"); show(JSON.parse(event.data)); });
    events.onerror = () => {
      say(events.readyState === EventSource.CLOSED ? "no live figures: reload the page" : "the server does not answer; trying again");
    };
  }

  function disconnect() {
    events.close();
    say("paused");
  }

  pause.addEventListener("click", () => {
    const paused = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", String(paused));
    paused ? disconnect() : connect();
  });

  function confirmed(question, button) {
    document.getElementById("question-text").textContent = question;
    document.getElementById("question-yes").textContent = button;
    dialog.returnValue = "no";
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    });
  }

  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (!form.dataset.question) return;
    event.preventDefault();
    const fields = new URLSearchParams(new FormData(form));
    const heading = form.closest("section").querySelector("h2");
    if (!(await confirmed(form.dataset.question, form.querySelector("button").textContent))) return;
    fields.set("confirmed", "yes");
    result.textContent = "Working…";
    try {
      const answer = await fetch(form.getAttribute("action"), { method: "POST", body: fields, headers: { Accept: "application/json" } });
      const told = await answer.json();
      result.textContent = told.message || told.error;
    } catch (error) {
      result.textContent = `The server did not answer: ${error.message}`;
    }
    heading.focus({ preventScroll: true }); // the button may be gone
    show({ ...waiting });
  });

  pause.hidden = connection.hidden = false;
  connect();
})();
