// Types of the parts of lit-html 3.3.3 that the page uses.

export interface TemplateResult {
  strings: TemplateStringsArray;
  values: unknown[];
}
export function html(strings: TemplateStringsArray, ...values: unknown[]): TemplateResult;
export const nothing: unique symbol;
export function render(value: unknown, place: HTMLElement): unknown;
