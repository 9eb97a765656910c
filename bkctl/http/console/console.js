// Reads the page again while "Live" is set; the choice is kept for this tab.
"use strict";
const live = document.getElementById("live");
if (live) {
  live.checked = sessionStorage.getItem("live") === "yes";
  live.addEventListener("change", () => sessionStorage.setItem("live", live.checked ? "yes" : "no"));
  setInterval(async () => {
    const main = document.getElementById("main");
    if (!live.checked || document.hidden || main.contains(document.activeElement)) return;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      if (answer.redirected) { location.href = answer.url; return; }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const left = main.querySelector(".wide")?.scrollLeft;
      main.replaceChildren(...page.getElementById("main").childNodes);
      if (left) main.querySelector(".wide").scrollLeft = left;
    } catch { /* The gateway is away; the next turn tries again. */ }
  }, 10000);
}
