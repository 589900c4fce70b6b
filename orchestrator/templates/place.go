package templates

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// place is what the next step, and in the end sandboxes, have as theirs.
type place struct {
	User string
	// Workdir is absolute; "" is the home of whoever does something.
	Workdir string
	// Env is what steps have added to the base's variables.
	Env map[string]string
}

const (
	// maxSteps bounds a recipe.
	maxSteps = 1000
	// maxValue bounds a variable, in bytes: the kernel's MAX_ARG_STRLEN.
	maxValue = 128 << 10
	// maxEnv bounds all that steps add.
	maxEnv = 1 << 20
	// maxPlaces bounds what all ENV steps lead to, together, as they are kept in memory; entrySize is what a variable takes beside its
	// text.
	maxPlaces = 16 << 20
	entrySize = 64
)

var (
	userForm = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?$`)
	sumForm  = regexp.MustCompile(`^[0-9a-f]{64}$`)
	modeForm = regexp.MustCompile(`^[0-7]{1,5}$`)
)

// ValidUser tells whether a user may be called so, and ValidSum whether that may be the sum of a COPY's files.
func ValidUser(name string) bool { return userForm.MatchString(name) }
func ValidSum(sum string) bool   { return sumForm.MatchString(sum) }

func invalid(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}

// after is the place that a step leads to. Nothing is done for that; the error is errdefs.ErrInvalidArgument. base are the variables
// of what the recipe is made of.
func (p place) after(s Step, base map[string]string) (place, error) {
	for _, a := range s.Args {
		if strings.ContainsRune(a, 0) {
			return p, invalid("%s has a zero byte", s.Type)
		}
	}
	switch s.Type {
	case Run:
		return p, checkRun(s.Args)
	case Copy:
		return p, checkCopy(s)
	case Env:
		return p.withEnv(s.Args, base)
	case Workdir:
		if len(s.Args) != 1 || s.Args[0] == "" {
			return p, invalid("WORKDIR takes a directory")
		}
		dir, err := expand(s.Args[0], p.lookup(base))
		if err != nil {
			return p, err
		}
		p.Workdir = p.path(dir)
		return p, nil
	case User:
		if len(s.Args) != 1 || !ValidUser(s.Args[0]) {
			return p, invalid("USER takes the name of a user, not %.100q: numbers and groups are for COPY", s.Args)
		}
		p.User = s.Args[0]
		return p, nil
	}
	return p, invalid("there is no step %.40q: RUN, COPY, ENV, WORKDIR and USER can be made", string(s.Type))
}

func checkRun(args []string) error {
	switch {
	case len(args) < 1 || len(args) > 2 || strings.TrimSpace(args[0]) == "":
		return invalid("RUN takes a command line, and maybe a user")
	case len(args) == 2 && args[1] != "" && !ValidUser(args[1]):
		return invalid("RUN can't be done as %.100q: a user's name is needed", args[1])
	}
	return nil
}

// copyArgs are a COPY's, those that it leaves out being "".
func copyArgs(s Step) (from, to, owner, mode string) {
	args := append(slices.Clone(s.Args), "", "")
	return args[0], args[1], args[2], args[3]
}

func checkCopy(s Step) error {
	if len(s.Args) < 2 || len(s.Args) > 4 || s.Args[0] == "" {
		return invalid("COPY takes what is copied, where to, and maybe an owner and an octal mode")
	}
	from, _, _, mode := copyArgs(s)
	switch {
	case path.IsAbs(from) || slices.Contains(strings.Split(from, "/"), ".."):
		return invalid("COPY can't copy %.200q: what is copied is below the directory of the template", from)
	case mode != "" && !modeForm.MatchString(mode):
		return invalid("COPY can't give files the mode %.40q: octal digits are needed", mode)
	case !ValidSum(s.Files):
		return invalid("COPY of %.200q names no files: filesHash must be a SHA-256 sum in hexadecimal digits", from)
	}
	return nil
}

func (p place) withEnv(args []string, base map[string]string) (place, error) {
	if len(args) == 0 || len(args)%2 != 0 {
		return p, invalid("ENV takes names and values, in turns")
	}
	look, env := p.lookup(base), maps.Clone(p.Env)
	if env == nil {
		env = map[string]string{}
	}
	for pair := range slices.Chunk(args, 2) {
		name := pair[0]
		if name == "" || strings.Contains(name, "=") {
			return p, invalid("ENV: %.100q is no name of a variable", name)
		}
		value, err := expand(pair[1], look) // by what was there before the step
		if err != nil {
			return p, fmt.Errorf("ENV %.100s: %w", name, err)
		}
		env[name] = value
	}
	p.Env = env
	if sum := p.text(); sum > maxEnv {
		return p, invalid("ENV: all variables have %d bytes; a template may have %d", sum, maxEnv)
	}
	return p, nil
}

// text is how much there is of variables, in bytes.
func (p place) text() (sum int) {
	for name, value := range p.Env {
		sum += len(name) + len(value)
	}
	return sum
}

// lookup finds variables.
func (p place) lookup(base map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		if v, ok := p.Env[name]; ok {
			return v, true
		}
		v, ok := base[name]
		return v, ok
	}
}

// path is a directory as it is seen from the place.
func (p place) path(dir string) string {
	switch {
	case path.IsAbs(dir):
		return path.Clean(dir)
	case dir == "~", strings.HasPrefix(dir, "~/"):
		return path.Join(homeOf(p.User), dir[1:])
	case p.Workdir == "":
		return path.Join(homeOf(p.User), dir)
	}
	return path.Join(p.Workdir, dir)
}

// homeOf is where the home of a user is in all but very few images.
func homeOf(user string) string {
	if user == "root" {
		return "/root"
	}
	return "/home/" + user
}

// environ is the variables as a process has them, sorted.
func environ(env map[string]string) []string {
	list := make([]string, 0, len(env))
	for _, name := range slices.Sorted(maps.Keys(env)) {
		list = append(list, name+"="+env[name])
	}
	return list
}

// variables are those of a list as a process has it.
func variables(list []string) map[string]string {
	env := map[string]string{}
	for _, v := range list {
		if name, value, ok := strings.Cut(v, "="); ok && name != "" {
			env[name] = value
		}
	}
	return env
}

// expand puts variables into a text as Dockerfiles have it: $NAME, ${NAME}, ${NAME:-INSTEAD} and ${NAME:+OTHER}; a backslash takes a
// character as it is.
func expand(text string, lookup func(string) (string, bool)) (string, error) {
	var out strings.Builder
	for i := 0; i < len(text); {
		if out.Len() > maxValue {
			return "", invalid("a value has more than %d bytes", maxValue)
		}
		switch c := text[i]; {
		case c == '\\' && i+1 < len(text):
			out.WriteByte(text[i+1])
			i += 2
		case c == '$' && i+1 < len(text) && text[i+1] == '{':
			end := strings.IndexByte(text[i:], '}')
			if end < 0 {
				return "", invalid("%.100q has a ${ without its }", text)
			}
			value, err := substitute(text[i+2:i+end], lookup)
			if err != nil {
				return "", err
			}
			out.WriteString(value)
			i += end + 1
		case c == '$' && nameLength(text[i+1:]) > 0:
			n := nameLength(text[i+1:])
			value, _ := lookup(text[i+1 : i+1+n])
			out.WriteString(value)
			i += 1 + n
		default:
			out.WriteByte(c)
			i++
		}
	}
	if out.Len() > maxValue {
		return "", invalid("a value has more than %d bytes", maxValue)
	}
	return out.String(), nil
}

// substitute is what stands for the inside of a ${}.
func substitute(inside string, lookup func(string) (string, bool)) (string, error) {
	n := nameLength(inside)
	name, rest := inside[:n], inside[n:]
	value, _ := lookup(name)
	switch {
	case n == 0:
	case rest == "":
		return value, nil
	case strings.HasPrefix(rest, ":-"):
		if value != "" {
			return value, nil
		}
		return rest[2:], nil
	case strings.HasPrefix(rest, ":+"):
		if value == "" {
			return "", nil
		}
		return rest[2:], nil
	}
	return "", invalid("%.100q can't be put in: ${NAME}, ${NAME:-INSTEAD} and ${NAME:+OTHER} can", "${"+inside+"}")
}

// nameLength is how long the name of a variable is that a text begins with.
func nameLength(text string) int {
	for i, c := range []byte(text) {
		if c != '_' && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (i == 0 || c < '0' || c > '9') {
			return i
		}
	}
	return len(text)
}
