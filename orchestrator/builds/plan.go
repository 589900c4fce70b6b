package builds

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/guests"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// Plan says what is to be built.
type Plan struct {
	// Image or Template is what it is made of: an image, by a name that containerd knows, or a template or snapshot that the team may
	// use, as users call it.
	Image    string `json:"image,omitempty"`
	Template string `json:"template,omitempty"`
	// Artefact is a template in a registry, by its digest, that it is taken from as it is.
	Artefact string `json:"artefact,omitempty"`
	// Sandbox is the one that Template is a snapshot of, for this build alone: it goes with its end.
	Sandbox string `json:"sandbox,omitempty"`
	// Secret: the image's registry is asked with a password, which is nowhere in here.
	Secret bool `json:"secret,omitempty"`
	// The rest is as in templates.Recipe.
	User    string           `json:"user,omitempty"`
	Workdir string           `json:"workdir,omitempty"`
	Steps   []templates.Step `json:"steps,omitempty"`
	Run     string           `json:"run,omitempty"`
	Ready   string           `json:"ready,omitempty"`
	Start   string           `json:"start,omitempty"`
	Hook    *db.Hook         `json:"hook,omitempty"`
	Force   bool             `json:"force,omitempty"`
	// Profile is how much of what a sandbox has is reserved for it; "" is as the template has it that this is made of.
	Profile admission.Profile `json:"profile,omitempty"`
	// By is who has asked for it, which Start knows.
	By audit.By `json:"by"`
}

func (p Plan) encode() json.RawMessage {
	b, err := json.Marshal(p)
	if err != nil {
		panic(fmt.Errorf("encode a plan: %w", err)) // it is made of strings
	}
	return b
}

func decodePlan(b json.RawMessage) (p Plan, err error) {
	if err := json.Unmarshal(b, &p); err != nil {
		return p, errdefs.ErrDataLoss.WithMessage(fmt.Sprintf("what was to be built can't be read: %v", err))
	}
	return p, nil
}

// Bounds of a plan.
const (
	maxCommand = 128 << 10 // bytes, as Linux has it for an argument of a process
	maxName    = 512
)

// hookPath are paths that need no escape.
var hookPath = regexp.MustCompile(`^/[A-Za-z0-9/._~-]{0,1000}$`)

func bad(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}

// check says what is wrong with a plan, naming the field of E2B's API.
func (p Plan) check() error {
	if err := p.checkOrigin(); err != nil {
		return err
	}
	if p.User != "" && !templates.ValidUser(p.User) {
		return bad("user: %q can't be one", p.User)
	}
	if why := checkPath(p.Workdir); p.Workdir != "" && why != "" {
		return bad("workdir: %s", why)
	}
	if _, err := admission.ParseProfile(string(p.Profile)); err != nil {
		return err
	}
	if err := checkSteps(p.Steps); err != nil {
		return err
	}
	for _, c := range [][2]string{{"startCmd", p.Run}, {"readyCmd", p.Ready}, {"start", p.Start}} {
		if why := checkCommand(c[1]); c[1] != "" && why != "" {
			return bad("%s: %s", c[0], why)
		}
	}
	switch {
	case p.Hook != nil && p.Run == "" && p.Image != "":
		return bad("there is no command (--run) that would serve the init hook")
	case p.Hook != nil && (p.Hook.Port < 1 || p.Hook.Port > math.MaxUint16 || p.Hook.Port == guests.Port):
		return bad("the init hook's port can't be %d", p.Hook.Port)
	case p.Hook != nil && !hookPath.MatchString(p.Hook.Path):
		return bad("the init hook's path can't be %q: /WORD/WORD, say, of letters, digits and ._~-", p.Hook.Path)
	}
	return nil
}

// checkOrigin is check for what it is made of.
func (p Plan) checkOrigin() error {
	switch {
	case p.Artefact != "" && (p.Image != "" || p.Template != "" || len(p.Steps) > 0):
		return bad("a template of a registry is what it is: nothing is done to it")
	case p.Artefact != "":
		named, err := reference.ParseNormalizedNamed(p.Artefact)
		if _, pinned := named.(reference.Canonical); err != nil || !pinned {
			return bad("%.200q is nothing that a registry has by its digest", p.Artefact)
		}
	case p.Image == "" && p.Template == "":
		return bad("fromImage: a template is made of an image or of another template (fromTemplate)")
	case p.Image != "" && p.Template != "":
		return bad("fromTemplate: there is fromImage already")
	case p.Secret && p.Image == "":
		return bad("fromImageRegistry: there is no fromImage")
	case len(p.Image) > maxName:
		return bad("fromImage: it has %d characters, there can be %d", len(p.Image), maxName)
	case p.Image != "":
		if _, err := reference.ParseDockerRef(p.Image); err != nil {
			return bad("fromImage: %q is not an image's name: %v", p.Image, err)
		}
	default:
		if _, err := db.ParseRef(p.Template); err != nil {
			return fmt.Errorf("fromTemplate: %w", err)
		}
	}
	return nil
}

func checkCommand(s string) (why string) {
	switch {
	case strings.TrimSpace(s) == "":
		return "it is empty"
	case strings.Contains(s, "\x00"):
		return "there can't be NUL in it"
	case len(s) > maxCommand:
		return fmt.Sprintf("it has %d bytes, there can be %d", len(s), maxCommand)
	}
	return ""
}

// checkSteps names a step that is wrong as E2B's API does.
func checkSteps(steps []templates.Step) error {
	err := templates.Recipe{Steps: steps}.CheckSteps()
	var failed *templates.Failure
	if !errors.As(err, &failed) {
		if err != nil {
			err = fmt.Errorf("steps: %w", err)
		}
		return err
	}
	n, bad := strconv.Atoi(failed.Step)
	if bad != nil {
		return err
	}
	return fmt.Errorf("steps[%d]: %w", n-1, failed.Err)
}

func checkPath(s string) (why string) {
	switch {
	case s == "":
		return "it is empty"
	case strings.ContainsAny(s, "\x00\n"):
		return "a path can't have NUL or line breaks in it"
	case len(s) > 4095:
		return "a path can't have more than 4095 bytes"
	}
	return ""
}
