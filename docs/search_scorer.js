// Scores of search results: Sphinx's defaults, with the research notes after all other pages.
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("research-notes/") ? score - 100 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
