package lifecycle

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// Guests is what answers in sandboxes. It isn't trusted: what comes from there is bounded.
type Guests interface {
	// Init tells envd who the sandbox is, as often as it takes until it answers, or ctx ends.
	Init(ctx context.Context, addr netip.Addr, i Init) error
	// Line opens a line to envd, which has answered on it.
	Line(ctx context.Context, addr netip.Addr) (Line, error)
	// Hook tells the program of a template's hook, as often as it takes until it has agreed, or ctx ends. That it has refused for
	// good is errdefs.ErrInvalidArgument.
	Hook(ctx context.Context, addr netip.Addr, h db.Hook, token string, b HookBody) error
	// Start has envd start a command line that goes on.
	Start(ctx context.Context, addr netip.Addr, token, command string) error
	// Exec has envd run a command line to its end, and hands what it writes to out as it comes.
	Exec(ctx context.Context, addr netip.Addr, token, line string, out func(Output)) (Exit, error)
	// Version asks envd for the level of E2B's interface that it has.
	Version(ctx context.Context, addr netip.Addr) (string, error)
	// Metrics asks envd what the sandbox uses.
	Metrics(ctx context.Context, addr netip.Addr, token string) (Metric, error)
}

// Line is a connection to one machine's envd, which costs nothing while nothing is said. What is told on it reaches that machine or
// nobody, even when another has its address.
type Line interface {
	// Init tells envd who the sandbox is, once: after an error it may have been told, and the line is of no use.
	Init(ctx context.Context, i Init) error
	Close() error
}

// Init is what envd is told.
type Init struct {
	SandboxID, TemplateID string
	Token                 string // "" for a sandbox that isn't secure
	// Former is the token that envd may have until then.
	Former string
	// HookToken is by which the program of the template's hook, if there is one, knows the control plane.
	HookToken     string
	Env           map[string]string
	User, Workdir string
	Request       string
}

// HookBody is what a hook is told, in JSON. Of its fields, only Env and Metadata are a user's.
type HookBody struct {
	Event      string            `json:"event"` // create, resume, fork, rollback or init
	SandboxID  string            `json:"sandboxId"`
	TemplateID string            `json:"templateId"`
	RequestID  string            `json:"requestId"`
	Env        map[string]string `json:"env"`
	Metadata   map[string]string `json:"metadata"`
}

// Why a sandbox is told who it is.
const (
	whyCreate   = "create"
	whyResume   = "resume"
	whyFork     = "fork"
	whyRollback = "rollback"
	whyInit     = "init"
)

// hookTimeout bounds how long a hook may refuse.
const hookTimeout = 30 * time.Second

// Reserved tells whether an environment variable is the control plane's alone.
func Reserved(key string) bool {
	return key == "E2B_SANDBOX" || key == "E2B_SANDBOX_ID" || key == "E2B_TEMPLATE_ID"
}

// identity is what envd is told of a sandbox.
func (e *Engine) identity(r *row, why string) Init {
	token, _ := e.tokens(r)
	env := maps.Clone(r.Env)
	maps.DeleteFunc(env, func(k, _ string) bool { return Reserved(k) })
	former := token
	if r.Origin != "" && (why == whyCreate || why == whyFork) {
		former = e.seed.envd(r.Origin)
	}
	hook := ""
	if r.Settings.Hook != nil {
		hook = e.seed.hook(r.ID)
	}
	return Init{SandboxID: r.ID, TemplateID: r.TemplateID, Token: token, Former: former, HookToken: hook, Env: env,
		User: r.Settings.User, Workdir: r.Settings.Workdir, Request: r.Request}
}

// introduce tells the sandbox who it is. It returns when envd has answered and the template's hook has agreed.
func (e *Engine) introduce(ctx context.Context, r *row, addr netip.Addr, why string) error {
	i := e.identity(r, why)
	return e.introduced(ctx, r, addr, why, i, func(ctx context.Context) error { return e.guests.Init(ctx, addr, i) })
}

// introduced is introduce where it is by tell that envd is told.
func (e *Engine) introduced(ctx context.Context, r *row, addr netip.Addr, why string, i Init, tell func(context.Context) error) error {
	if err := e.stage(ctx, stageEnvd, r.ID, tell); err != nil {
		return fmt.Errorf("sandbox %s: envd: %w", r.ID, err)
	}
	if h := r.Settings.Hook; h != nil {
		hctx, cancel := context.WithTimeoutCause(ctx, e.Timeout(hookTimeout), &late{e.Timeout(hookTimeout)})
		defer cancel()
		body := HookBody{Event: why, SandboxID: r.ID, TemplateID: r.TemplateID, RequestID: r.Request, Env: i.Env, Metadata: r.Metadata}
		err := e.stage(hctx, stageHook, r.ID, func(ctx context.Context) error { return e.guests.Hook(ctx, addr, *h, i.HookToken, body) })
		if err != nil {
			why := fmt.Sprintf("sandbox %s: the init hook of its template, port %d, path %s: %v", r.ID, h.Port, h.Path, err)
			if errdefs.IsInvalidArgument(err) { // another try with the same doesn't help
				return errdefs.ErrInvalidArgument.WithMessage(why)
			}
			return errdefs.ErrUnavailable.WithMessage(why)
		}
	}
	if s := r.Settings.Start; s != "" && (why == whyCreate || why == whyFork || why == whyResume && r.Cold) {
		err := e.stage(ctx, stageStart, r.ID, func(ctx context.Context) error { return e.guests.Start(ctx, addr, i.Token, s) })
		if err != nil {
			return fmt.Errorf("sandbox %s: start command of its template: %w", r.ID, err)
		}
	}
	return nil
}
