// Renders what pymdownx.arithmatex has marked, with the KaTeX that is shipped beside this file.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim();
    katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
  }
});
