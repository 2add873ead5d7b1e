"""What the rules of the server have to know of a language: one table, an entry a grammar, and no code.

An entry names the grammar's package and what its trees call things. Names of nodes are those of the grammar, tokens
without a name included (`then`, `{`); a name that a grammar does not have is a fault that a test finds. A language
that is not in the table goes by lines and brackets.

It knows neither documents nor cursors, and imports a grammar only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Literal

from tree_sitter import Language as Grammar
from tree_sitter import Node

#: What holds a block together: brackets, its indentation, a keyword (or a tag) at its end, or nothing.
Block = Literal["braces", "indentation", "end", "none"]

NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Text of another language inside a node."""

    #: The node, and its children before and after that text, where they stand on lines of their own or not.
    node: str
    opening: frozenset[str]
    closing: frozenset[str]
    #: What finds the language's id in the text of the opening (the group `id`), and the one without it ("": none).
    named: str = ""
    default: str = ""
    #: The name of the tag that begins it, by which it is known while that has no end yet.
    tag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """A language that has a grammar."""

    #: On PyPI; the module's name has underscores. `function` returns the grammar.
    package: str
    function: str = "language"
    block: Block = "braces"
    #: What people indent by where the file does not say.
    indent: str = "    "
    line_comment: str = ""
    comments: frozenset[str] = frozenset({"comment"})
    strings: frozenset[str] = NONE
    #: Code inside strings.
    interpolations: frozenset[str] = NONE
    #: Characters that begin a string in a line too broken to have nodes.
    quotes: str = "\"'"
    #: How a line begins on which a comment or a string begins that documents something.
    docs: tuple[str, ...] = ()
    #: Whether a string that is the first statement of a definition's body documents it.
    docstrings: bool = False
    #: Lists of arguments and of parameters.
    arguments: frozenset[str] = NONE
    #: Tokens that end the header of a body at a line's end, brackets aside -> what closes that body ("": a dedent).
    openers: Mapping[str, str] = field(default_factory=dict)
    #: The same for nodes of several tokens: lists of parameters, tags.
    headers: Mapping[str, str] = field(default_factory=dict)
    #: The nodes that such an opener or header is a part of then; empty: any.
    bodies: frozenset[str] = NONE
    #: First words of such a header, for code too broken to have nodes -> what closes its body. With the block style
    #: "end" they do without an opener.
    words: Mapping[str, str] = field(default_factory=dict)
    #: Words and signs that begin a line which ends a body without ending the statement: `else`.
    clauses: frozenset[str] = NONE
    #: Definitions, and those of them that hold others; what stands around one and belongs to it; imports.
    definitions: frozenset[str] = NONE
    containers: frozenset[str] = NONE
    wrappers: frozenset[str] = NONE
    imports: frozenset[str] = NONE
    #: What nodes of definitions begin with, and those of them that hold others, where they are calls like any other.
    defining: frozenset[str] = NONE
    containing: frozenset[str] = NONE
    injections: tuple[Injection, ...] = ()

    def defines(self, node: Node) -> bool:
        """Whether the node is a definition."""
        return node.type in self.definitions and (not self.defining or _first_word(node) in self.defining)

    def contains(self, node: Node) -> bool:
        """Whether the node is a definition that holds others."""
        return node.type in self.containers and (not self.containing or _first_word(node) in self.containing)

    @property
    def module(self) -> str:
        """The name that the grammar's package is imported by."""
        return self.package.replace("-", "_")


def _first_word(node: Node) -> str:
    return text_of(node.child(0) if node.child_count else None)


def text_of(node: Node | None) -> str:
    """What a node spans of the text that it was parsed from; "" of none."""
    return (node.text or b"").decode("utf-8", "replace") if node is not None else ""


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _all(names: str, closer: str = "") -> dict[str, str]:
    return dict.fromkeys(names.split(), closer)


#: `lang` says it before `type`, which may say `module`; not an attribute that ends with such a name.
_SCRIPT = (
    r"""(?<![\w:.-])(?:lang|type(?![\s\S]*\slang\s*=))\s*=\s*["']?(?:text/|application/)?(?:x-)?(?P<id>[\w+#-]+)"""
)

_JAVASCRIPT = Language(
    package="tree-sitter-javascript",
    indent="  ",
    line_comment="//",
    comments=_set("comment html_comment"),
    strings=_set("string template_string"),
    interpolations=_set("template_substitution"),
    quotes="\"'`",
    docs=("/**",),
    arguments=_set("arguments formal_parameters"),
    openers=_all(": =>"),
    bodies=_set("switch_case switch_default arrow_function"),
    words=_all("case default"),
    definitions=_set(
        "function_declaration generator_function_declaration class_declaration method_definition field_definition"
    ),
    containers=_set("class_declaration"),
    wrappers=_set("export_statement"),
    imports=_set("import_statement"),
)
_TYPESCRIPT = replace(
    _JAVASCRIPT,
    package="tree-sitter-typescript",
    function="language_typescript",
    definitions=_set(
        "function_declaration generator_function_declaration class_declaration abstract_class_declaration "
        "method_definition method_signature interface_declaration enum_declaration type_alias_declaration "
        "internal_module"
    ),
    containers=_set("class_declaration abstract_class_declaration interface_declaration internal_module"),
    wrappers=_set("export_statement ambient_declaration"),
)

LANGUAGES: dict[str, Language] = {
    "python": Language(
        package="tree-sitter-python",
        block="indentation",
        line_comment="#",
        strings=_set("string"),
        interpolations=_set("interpolation"),
        docs=('"""', "'''", 'r"""', "r'''"),
        docstrings=True,
        arguments=_set("argument_list parameters"),
        openers=_all(":"),
        bodies=_set(
            "function_definition class_definition if_statement elif_clause else_clause for_statement while_statement "
            "try_statement except_clause finally_clause with_statement match_statement case_clause"
        ),
        words=_all("async case class def elif else except finally for if match try while with"),
        clauses=_set("elif else except finally"),
        definitions=_set("function_definition class_definition"),
        containers=_set("class_definition"),
        wrappers=_set("decorated_definition"),
        imports=_set("import_statement import_from_statement future_import_statement"),
    ),
    "javascript": _JAVASCRIPT,
    "typescript": _TYPESCRIPT,
    "tsx": replace(_TYPESCRIPT, function="language_tsx"),
    "rust": Language(
        package="tree-sitter-rust",
        line_comment="//",
        comments=_set("line_comment block_comment"),
        strings=_set("string_literal raw_string_literal char_literal"),
        quotes='"',
        docs=("///", "//!", "/**", "/*!"),
        arguments=_set("arguments parameters type_arguments type_parameters token_tree"),
        openers=_all("=>"),
        bodies=_set("match_arm"),
        definitions=_set(
            "function_item function_signature_item struct_item enum_item union_item trait_item impl_item mod_item "
            "type_item const_item static_item macro_definition"
        ),
        containers=_set("trait_item impl_item mod_item"),
        imports=_set("use_declaration extern_crate_declaration"),
    ),
    "go": Language(
        package="tree-sitter-go",
        indent="\t",
        line_comment="//",
        strings=_set("interpreted_string_literal raw_string_literal rune_literal"),
        quotes="\"'`",
        arguments=_set("argument_list parameter_list type_parameter_list"),
        openers=_all(":"),
        bodies=_set("expression_case type_case communication_case default_case labeled_statement"),
        words=_all("case default"),
        definitions=_set("function_declaration method_declaration type_declaration"),
        imports=_set("import_declaration package_clause"),
    ),
    "c": Language(
        package="tree-sitter-c",
        line_comment="//",
        strings=_set("string_literal char_literal system_lib_string"),
        docs=("/**", "///", "//!", "/*!"),
        arguments=_set("argument_list parameter_list preproc_params"),
        openers=_all(":"),
        bodies=_set("case_statement labeled_statement"),
        words=_all("case default"),
        definitions=_set("function_definition struct_specifier union_specifier enum_specifier type_definition"),
        imports=_set("preproc_include"),
    ),
    "cpp": Language(
        package="tree-sitter-cpp",
        line_comment="//",
        strings=_set("string_literal raw_string_literal char_literal system_lib_string"),
        docs=("/**", "///", "//!", "/*!"),
        arguments=_set(
            "argument_list parameter_list preproc_params template_argument_list template_parameter_list "
            "lambda_capture_specifier"
        ),
        openers=_all(":"),
        bodies=_set("case_statement labeled_statement field_declaration_list"),
        words=_all("case default public private protected"),
        definitions=_set(
            "function_definition class_specifier struct_specifier union_specifier enum_specifier namespace_definition "
            "type_definition alias_declaration concept_definition"
        ),
        containers=_set("class_specifier struct_specifier namespace_definition"),
        wrappers=_set("template_declaration"),
        imports=_set("preproc_include using_declaration"),
    ),
    "java": Language(
        package="tree-sitter-java",
        line_comment="//",
        comments=_set("line_comment block_comment"),
        strings=_set("string_literal character_literal"),
        interpolations=_set("string_interpolation"),
        docs=("/**",),
        arguments=_set("argument_list formal_parameters inferred_parameters annotation_argument_list"),
        openers=_all(": ->"),
        bodies=_set("switch_block_statement_group switch_rule lambda_expression"),
        words=_all("case default"),
        definitions=_set(
            "class_declaration interface_declaration enum_declaration record_declaration method_declaration "
            "constructor_declaration annotation_type_declaration"
        ),
        containers=_set("class_declaration interface_declaration enum_declaration record_declaration"),
        imports=_set("import_declaration package_declaration"),
    ),
    "csharp": Language(
        package="tree-sitter-c-sharp",
        line_comment="//",
        strings=_set(
            "string_literal verbatim_string_literal raw_string_literal interpolated_string_expression character_literal"
        ),
        interpolations=_set("interpolation"),
        docs=("///", "/**"),
        arguments=_set("argument_list parameter_list bracketed_argument_list attribute_argument_list"),
        openers=_all(": =>"),
        bodies=_set("switch_section arrow_expression_clause lambda_expression switch_expression_arm"),
        words=_all("case default"),
        definitions=_set(
            "class_declaration interface_declaration struct_declaration enum_declaration record_declaration "
            "method_declaration constructor_declaration property_declaration namespace_declaration "
            "delegate_declaration"
        ),
        containers=_set(
            "class_declaration interface_declaration struct_declaration record_declaration namespace_declaration"
        ),
        imports=_set("using_directive"),
    ),
    "ruby": Language(
        package="tree-sitter-ruby",
        block="end",
        indent="  ",
        line_comment="#",
        strings=_set("string heredoc_body subshell regex delimited_symbol"),
        interpolations=_set("interpolation"),
        arguments=_set("argument_list method_parameters"),
        openers=_all("do then begin else ensure", "end"),
        headers=_all("method_parameters block_parameters", "end"),
        bodies=_set("method singleton_method do_block begin if unless else ensure do while until for"),
        words=_all("def class module if unless while until case when for begin else elsif rescue ensure in", "end"),
        clauses=_set("else elsif when rescue ensure in"),
        definitions=_set("method singleton_method class module singleton_class"),
        containers=_set("class module singleton_class"),
    ),
    "php": Language(
        package="tree-sitter-php",
        function="language_php",
        line_comment="//",
        strings=_set("string encapsed_string heredoc nowdoc shell_command_expression"),
        docs=("/**",),
        arguments=_set("arguments formal_parameters"),
        openers=_all(": =>"),
        bodies=_set("case_statement default_statement colon_block arrow_function match_conditional_expression"),
        words=_all("case default"),
        definitions=_set(
            "function_definition class_declaration interface_declaration trait_declaration enum_declaration "
            "method_declaration namespace_definition"
        ),
        containers=_set("class_declaration interface_declaration trait_declaration enum_declaration"),
        imports=_set("namespace_use_declaration"),
    ),
    "kotlin": Language(
        package="tree-sitter-kotlin",
        line_comment="//",
        comments=_set("line_comment block_comment"),
        strings=_set("string_literal multiline_string_literal character_literal"),
        interpolations=_set("interpolation"),
        docs=("/**",),
        arguments=_set("value_arguments function_value_parameters class_parameters type_arguments"),
        openers=_all("= ->"),
        bodies=_set("function_body function_declaration property_declaration when_entry lambda_literal"),
        definitions=_set("function_declaration class_declaration object_declaration companion_object type_alias"),
        containers=_set("class_declaration object_declaration companion_object"),
        imports=_set("import package_header"),
    ),
    "swift": Language(
        package="tree-sitter-swift",
        line_comment="//",
        comments=_set("comment multiline_comment"),
        strings=_set("line_string_literal multi_line_string_literal raw_string_literal"),
        interpolations=_set("interpolated_expression raw_str_interpolation"),
        quotes='"',
        docs=("///", "/**"),
        arguments=_set("value_arguments function_declaration init_declaration"),
        openers=_all(": in"),
        bodies=_set("switch_entry lambda_literal lambda_function_type"),
        words=_all("case default"),
        definitions=_set(
            "function_declaration init_declaration deinit_declaration class_declaration protocol_declaration "
            "typealias_declaration protocol_function_declaration subscript_declaration"
        ),
        containers=_set("class_declaration protocol_declaration"),
        imports=_set("import_declaration"),
    ),
    "scala": Language(
        package="tree-sitter-scala",
        indent="  ",
        line_comment="//",
        comments=_set("comment block_comment"),
        strings=_set("string interpolated_string character_literal"),
        interpolations=_set("interpolation"),
        quotes='"',
        docs=("/**",),
        arguments=_set("arguments parameters class_parameters type_arguments"),
        openers=_all("= => : then do else yield match with try catch finally"),
        clauses=_set("else catch finally"),
        definitions=_set(
            "function_definition function_declaration class_definition object_definition trait_definition "
            "enum_definition given_definition extension_definition type_definition"
        ),
        containers=_set("class_definition object_definition trait_definition enum_definition extension_definition"),
        imports=_set("import_declaration package_clause"),
    ),
    "lua": Language(
        package="tree-sitter-lua",
        block="end",
        indent="  ",
        line_comment="--",
        strings=_set("string"),
        docs=("---",),
        arguments=_set("arguments parameters"),
        openers=_all("then do else", "end") | {"repeat": "until"},
        headers=_all("parameters", "end"),
        bodies=_set(
            "if_statement elseif_statement else_statement for_statement while_statement do_statement repeat_statement "
            "function_declaration function_definition"
        ),
        words=_all("function if for while else elseif do", "end") | {"repeat": "until"},
        clauses=_set("else elseif"),
        definitions=_set("function_declaration"),
    ),
    "bash": Language(
        package="tree-sitter-bash",
        block="end",
        indent="  ",
        line_comment="#",
        strings=_set("string raw_string ansi_c_string translated_string heredoc_body"),
        interpolations=_set(
            "command_substitution expansion simple_expansion process_substitution arithmetic_expansion"
        ),
        openers=_all("then else", "fi") | _all("do", "done") | _all("in", "esac") | _all(")", ";;"),
        bodies=_set("if_statement elif_clause else_clause do_group case_statement case_item"),
        clauses=_set("else elif"),
        definitions=_set("function_definition"),
    ),
    "html": Language(
        package="tree-sitter-html",
        block="end",
        indent="  ",
        strings=_set("quoted_attribute_value"),
        quotes="",
        headers=_all("start_tag", "</"),
        bodies=_set("element"),
        injections=(
            Injection(
                node="script_element",
                opening=_set("start_tag"),
                closing=_set("end_tag"),
                named=_SCRIPT,
                default="javascript",
                tag="script",
            ),
            Injection(
                node="style_element",
                opening=_set("start_tag"),
                closing=_set("end_tag"),
                named=_SCRIPT,
                default="css",
                tag="style",
            ),
        ),
    ),
    "css": Language(
        package="tree-sitter-css",
        indent="  ",
        comments=_set("comment js_comment"),
        strings=_set("string_value"),
        arguments=_set("arguments"),
        definitions=_set("rule_set media_statement keyframes_statement supports_statement at_rule"),
        imports=_set("import_statement charset_statement"),
    ),
    "json": Language(package="tree-sitter-json", indent="  ", line_comment="//", strings=_set("string"), quotes='"'),
    "yaml": Language(
        package="tree-sitter-yaml",
        block="indentation",
        indent="  ",
        line_comment="#",
        strings=_set("double_quote_scalar single_quote_scalar"),
        quotes="",
        openers=_all(":"),
        bodies=_set("block_mapping_pair"),
    ),
    "toml": Language(
        package="tree-sitter-toml",
        block="none",
        line_comment="#",
        strings=_set("string quoted_key"),
        definitions=_set("table table_array_element"),
    ),
    "markdown": Language(
        package="tree-sitter-markdown",
        block="none",
        indent="  ",
        comments=NONE,
        quotes="",
        definitions=_set("atx_heading setext_heading"),
        injections=(
            Injection(
                node="fenced_code_block",
                opening=_set("fenced_code_block_delimiter info_string"),
                closing=_set("fenced_code_block_delimiter"),
                named=r"^[\s>*+-]*[`~]+\s*\{?\s*\.?(?P<id>[\w+#-]+)",
            ),
            Injection(node="minus_metadata", opening=NONE, closing=NONE, default="yaml"),
            Injection(node="plus_metadata", opening=NONE, closing=NONE, default="toml"),
        ),
    ),
    "sql": Language(
        package="tree-sitter-sql",
        block="none",
        line_comment="--",
        comments=_set("comment marginalia"),
        strings=_set("literal"),
        arguments=_set("invocation function_arguments column_definitions ordered_columns list"),
        definitions=_set(
            "create_table create_view create_function create_index create_type create_trigger create_query"
        ),
        wrappers=_set("statement"),
    ),
    "zig": Language(
        package="tree-sitter-zig",
        line_comment="//",
        strings=_set("string multiline_string character"),
        docs=("///", "//!"),
        arguments=_set("arguments parameters call_expression builtin_function"),
        openers=_all("=>"),
        bodies=_set("switch_case"),
        definitions=_set("function_declaration test_declaration variable_declaration"),
    ),
    "julia": Language(
        package="tree-sitter-julia",
        block="end",
        line_comment="#",
        comments=_set("line_comment block_comment"),
        strings=_set("string_literal command_literal prefixed_string_literal character_literal"),
        interpolations=_set("string_interpolation"),
        quotes='"',
        docs=('"""',),
        arguments=_set("argument_list tuple_expression"),
        openers=_all("begin do else try finally", "end"),
        headers=_all("signature argument_list", "end"),
        bodies=_set("function_definition macro_definition compound_statement do_clause else_clause try_statement"),
        words=_all(
            "function macro struct mutable module if for while let begin quote try else elseif catch finally",
            "end",
        ),
        clauses=_set("else elseif catch finally"),
        definitions=_set(
            "function_definition macro_definition struct_definition abstract_definition module_definition"
        ),
        containers=_set("module_definition"),
        imports=_set("import_statement using_statement"),
    ),
    "haskell": Language(
        package="tree-sitter-haskell",
        block="indentation",
        indent="  ",
        line_comment="--",
        comments=_set("comment haddock"),
        strings=_set("string char quasiquote_body"),
        quotes='"',
        docs=("-- |", "-- ^", "{-|", "{-^"),
        openers=_all("where do of = -> let then else"),
        definitions=_set("function signature data_type newtype class instance type_synonym bind"),
        containers=_set("class instance"),
        imports=_set("import"),
    ),
    "elixir": Language(
        package="tree-sitter-elixir",
        block="end",
        indent="  ",
        line_comment="#",
        strings=_set("string charlist sigil quoted_atom"),
        interpolations=_set("interpolation"),
        quotes='"',
        docs=("@doc", "@moduledoc", "@typedoc"),
        arguments=_set("arguments"),
        openers=_all("do else after rescue catch", "end") | _all("->"),
        bodies=_set("do_block else_block after_block rescue_block catch_block stab_clause"),
        words=_all("else after rescue catch", "end"),
        clauses=_set("else after rescue catch"),
        definitions=_set("call"),
        containers=_set("call"),
        defining=_set("def defp defmacro defmacrop defguard defguardp defdelegate defmodule defprotocol defimpl"),
        containing=_set("defmodule defprotocol defimpl"),
    ),
    "ocaml": Language(
        package="tree-sitter-ocaml",
        function="language_ocaml",
        block="indentation",
        indent="  ",
        strings=_set("string quoted_string character"),
        quotes='"',
        docs=("(**",),
        openers=_all("= -> then else do with function try") | _all("struct sig begin object", "end"),
        clauses=_set("end done else with"),
        definitions=_set(
            "value_definition type_definition module_definition module_type_definition exception_definition"
        ),
        containers=_set("module_definition"),
        imports=_set("open_module"),
    ),
    "make": Language(
        package="tree-sitter-make",
        block="indentation",
        indent="\t",
        line_comment="#",
        strings=_set("string"),
        quotes="",
        arguments=_set("function_call variable_reference"),
        openers=_all(":"),
        headers=_all("prerequisites"),
        bodies=_set("rule"),
        clauses=_set("else endif endef"),
        definitions=_set("rule define_directive"),
        imports=_set("include_directive"),
    ),
}

#: What else editors, fences and other tools call the languages of the table.
ALIASES = {
    "py": "python",
    "python3": "python",
    "js": "javascript",
    "mjs": "javascript",
    "cjs": "javascript",
    "jsx": "javascript",
    "javascriptreact": "javascript",
    "javascript.jsx": "javascript",
    "module": "javascript",
    "ecmascript": "javascript",
    "ts": "typescript",
    "typescriptreact": "tsx",
    "typescript.tsx": "tsx",
    "rs": "rust",
    "golang": "go",
    "c++": "cpp",
    "cc": "cpp",
    "cxx": "cpp",
    "h": "c",
    "hpp": "cpp",
    "cuda": "cpp",
    "cuda-cpp": "cpp",
    "arduino": "cpp",
    "c#": "csharp",
    "cs": "csharp",
    "c_sharp": "csharp",
    "rb": "ruby",
    "kt": "kotlin",
    "kts": "kotlin",
    "sc": "scala",
    "luau": "lua",
    "sh": "bash",
    "zsh": "bash",
    "shell": "bash",
    "shellscript": "bash",
    "babel": "javascript",
    "html5": "html",
    "template": "html",
    "xhtml": "html",
    "vue": "html",
    "svelte": "html",
    "postcss": "css",
    "jsonc": "json",
    "json5": "json",
    "jsonl": "json",
    "ld+json": "json",
    "importmap": "json",
    "speculationrules": "json",
    "yml": "yaml",
    "dockercompose": "yaml",
    "github-actions-workflow": "yaml",
    "md": "markdown",
    "mdx": "markdown",
    "rmd": "markdown",
    "quarto": "markdown",
    "mysql": "sql",
    "pgsql": "sql",
    "plsql": "sql",
    "postgres": "sql",
    "postgresql": "sql",
    "sqlite": "sql",
    "jl": "julia",
    "hs": "haskell",
    "lhaskell": "haskell",
    "ex": "elixir",
    "exs": "elixir",
    "ml": "ocaml",
    "makefile": "make",
    "mk": "make",
}

#: What LSP calls the languages that have other names here.
LSP_IDS = {"bash": "shellscript", "make": "makefile", "tsx": "typescriptreact"}

#: A language that is not in the table: its blocks go by brackets and indentation.
PLAIN = Language(package="", comments=NONE, quotes="")


def name_of(language: str) -> str:
    """The table's name for an editor's language id, or for what a fence calls one; the id itself if there is none."""
    lower = language.lower()
    return ALIASES.get(lower, lower)


def lsp_id(language: str) -> str:
    """What LSP calls a language of whatever name."""
    name = name_of(language)
    return LSP_IDS.get(name, name)


def of(language: str) -> Language:
    """What is known of an editor's language id."""
    return LANGUAGES.get(name_of(language), PLAIN)


def grammar(language: str) -> Grammar | None:
    """None without an entry, without the package, or with one this tree-sitter cannot load."""
    known = of(language)
    return _load(known.module, known.function) if known.package else None


@cache
def _load(module: str, function: str) -> Grammar | None:
    try:
        return Grammar(getattr(import_module(module), function)())
    except (ImportError, ValueError):
        return None
