"""Turns a list of Fast AutoAugment's authors into a policy file.

Usage:
    python tools/convert_policy.py --input=FILE --output=POLICY.json [--name=NAME]

FILE holds a list of sub-policies, [[('Contrast', 0.83, 0.81), ('Rotate', 0.33, 0.36)], ...], with
round or square brackets: alone (JSON will do), or in Python code as `NAME = [...]` or in a function
NAME that assigns or returns it, such as the authors' archive.py. The code is parsed, never run. The
result is for --policy=POLICY.json of the training program.

Their levels, 0..1, mean something else than ours (see amdim_tf/policy_tables.py) for

- ShearX, ShearY, TranslateX, TranslateY, Rotate: theirs run from one end of the range to the other,
  -0.3..0.3, -0.45..0.45 of the side, -30..30 degrees, and then change sign with probability 1/2.
  That is our level |2·level - 1|, times 0.45 / (150/331) for translations.
- Posterize: theirs cuts the bits, 4 + 4·level, off to a whole number, ours rounds them.
- Posterize2: 0 to 4 bits. Ours has no fewer than 4, and so they become 4.
"""

import ast
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import flags

from amdim_tf import cli_flags
from amdim_tf import policy_tables as tables
from amdim_tf.errors import UserError

flags.DEFINE(cli_flags.PATH, "input", None, "File with the published list.")
flags.DEFINE(cli_flags.PATH, "output", None, "Policy file to write; ends in .json.")
flags.DEFINE_string("name", None, "Which list: its variable or function, where there are several.")

# Their names -> ours.
_OPERATIONS = {
    "ShearX": "shear_x",
    "ShearY": "shear_y",
    "TranslateX": "translate_x",
    "TranslateY": "translate_y",
    "Rotate": "rotate",
    "AutoContrast": "autocontrast",
    "Invert": "invert",
    "Equalize": "equalize",
    "Solarize": "solarize",
    "Posterize": "posterize",
    "Posterize2": "posterize",
    "Contrast": "contrast",
    "Color": "color",
    "Brightness": "brightness",
    "Sharpness": "sharpness",
    "Cutout": "cutout",
}
_FURTHEST_TRANSLATION = 0.45  # of the side


class _ListFinder(ast.NodeVisitor):
    """Finds the lists of lists that statements assign, return or consist of."""

    def __init__(self):
        self.found: list[tuple[set[str], ast.expr]] = []  # the names of a list, and the list
        self._functions: list[str] = []  # those around the statement

    def visit_FunctionDef(self, node):
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Assign(self, node):
        variables = {target.id for target in node.targets if isinstance(target, ast.Name)}
        self._keep(node.value, variables)

    def visit_Return(self, node):
        self._keep(node.value, set())

    def visit_Expr(self, node):
        self._keep(node.value, set())

    def _keep(self, value, variables):
        lists = (ast.List, ast.Tuple)
        if isinstance(value, lists) and any(isinstance(item, lists) for item in value.elts):
            self.found.append((variables | set(self._functions), value))


def find_list(text: str, source: str, name: str | None):
    """The list in a text of Python or JSON, as lists, texts and numbers; no code is run.

    Args:
        text: of the file.
        source: the file's path, for messages.
        name: of the variable or function, or None if there is only one list.
    """
    finder = _ListFinder()
    try:
        finder.visit(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "too deep a nesting"
        raise UserError(f"{source}: expected a Python or JSON list. Received: {reason}.") from None
    lists = [value for names, value in finder.found if name is None or name in names]
    if len(lists) != 1:
        known = sorted(set().union(*(names for names, _ in finder.found)))
        raise UserError(
            f"{source}: expected one list of sub-policies{f' named {name}' if name else ''}. "
            f"Received: {len(lists)}. Names in the file: {', '.join(known) or 'none'}; choose one "
            "with --name."
        )
    try:
        return ast.literal_eval(lists[0])
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise UserError(
            f"{source}: line {lists[0].lineno}: expected a list of texts and numbers only. "
            "Received: a list that has to be computed."
        ) from None


def convert_step(step: tables.Step) -> tables.Step:
    """A step with the name and the level that mean the same here."""
    operation, level = _OPERATIONS[step.operation], step.level
    if operation in tables.SIGNED:
        level = abs(2 * level - 1)
    if operation in ("translate_x", "translate_y"):
        level *= _FURTHEST_TRANSLATION / tables.RANGES[operation][1]
    if step.operation == "Posterize":
        level = math.floor(4 * level) / 4
    if step.operation == "Posterize2":
        level = 0.0
    return tables.Step(operation, step.probability, level)


def main() -> None:
    """Reads, converts, writes."""
    source = cli_flags.require("input", "the file with the published list")
    output = cli_flags.require("output", "the policy file to write")
    if not output.endswith(".json"):
        raise UserError(f"--output: expected a path that ends in .json. Received: {output!r}.")
    value = find_list(tables.read_text(source), source, cli_flags.FLAGS.name)
    published = tables.parse_sub_policies(value, source, _OPERATIONS)
    policy = tables.Policy(tuple(tuple(map(convert_step, steps)) for steps in published))
    tables.save(policy, output)
    print(f"{output}: written, sub-policies: {len(policy.sub_policies)}. Use: --policy={output}")
    few_bits = sum(step.operation == "Posterize2" for steps in published for step in steps)
    if few_bits:
        print(f"Steps whose bits, 0 to 4, became 4: {few_bits} (Posterize2).")


if __name__ == "__main__":
    cli_flags.run(main)
