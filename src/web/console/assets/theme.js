// Sets the theme that this tab chose, before the page is drawn.
const theme = sessionStorage.getItem("axed.theme");
if (theme) document.documentElement.dataset.theme = theme;
