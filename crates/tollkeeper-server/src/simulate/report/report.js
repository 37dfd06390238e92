for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const up = head.getAttribute("aria-sort") === "descending";
    const value = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      return x !== "" && y !== "" && !isNaN(x) && !isNaN(y) ? x - y : x.localeCompare(y);
    };
    const rows = [...body.rows].sort((a, b) => (up ? compare(a, b) : compare(b, a)));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows);
  });
}
