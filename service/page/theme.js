// Not a module, and in the head: the page shall not be drawn in the wrong colours first.
(() => {
  const KEY = "spd.theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const chosen = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage is switched off
    }
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const theme = chosen();
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", isDark() ? "Light colours" : "Dark colours");
    };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem(KEY, root.dataset.theme);
      } catch {
        // then it lasts until the page is loaded again
      }
      show();
    });
    dark.addEventListener("change", show);
    show();
  });
})();
