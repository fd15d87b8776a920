// Sets what the style sheet needs to know before the page is drawn: that there are scripts, and the theme that this tab chose.
document.documentElement.dataset.scripts = "";
const theme = sessionStorage.getItem("axed.theme");
if (theme) document.documentElement.dataset.theme = theme;
