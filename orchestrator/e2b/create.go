package e2b

import (
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/e2b/jsonbody"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// Timeouts where a client asks for none, by the generation of its SDK.
const (
	timeoutV1 = 15
	timeoutV2 = 300
)

// generation is of SDKs: each has its own defaults.
type generation struct {
	timeout int  // seconds
	secure  bool // sandboxes always are
}

var (
	v1 = generation{timeout: timeoutV1}
	v2 = generation{timeout: timeoutV2, secure: true}
)

// What environment variables may be: a process can't be started with more in one of them, of name, "=", value and NUL.
const maxEnv = 128 << 10

// Bounds of what a sandbox is given to keep.
const (
	maxMetadata = 64 << 10 // bytes, of all of it
	maxAllEnv   = 512 << 10
)

// securePublic is the message that E2B has for it, to the letter.
const securePublic = "You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag."

// notYet is why what E2B has is refused.
const notYet = "it isn't supported here"

func (s *Server) create(g generation) func(*call) (answer, error) {
	return func(c *call) (answer, error) {
		wanted, err := s.readCreate(c, g)
		if err != nil {
			return answer{}, err
		}
		sb, err := s.engine.Create(c.ctx, wanted)
		if err != nil {
			return answer{}, err
		}
		return created(s.sandbox(sb)), nil
	}
}

// readCreate checks all that can be checked without knowing the template.
func (s *Server) readCreate(c *call, g generation) (lifecycle.Create, error) {
	b := c.body
	b.Require("templateID")
	b.Refuse("mcp", notYet)
	b.Refuse("iam", notYet)
	b.Refuse("volumeMounts", notYet)
	w := lifecycle.Create{
		Team:            c.team,
		Timeout:         s.timeoutIn(b, g.timeout, 1),
		AutoPause:       b.Bool("autoPause", false),
		AutoPauseMemory: b.Bool("autoPauseMemory", true),
		Secure:          b.Bool("secure", g.secure),
		AllowInternet:   readAllowInternet(b),
		Metadata:        b.StringMap("metadata"),
		Env:             b.StringMap("envVars"),
		RequestID:       c.id,
	}
	if b.Has("templateID") {
		ref, image, err := parseOrigin("templateID", b.String("templateID"))
		c.note(err)
		if w.Image = image; image == "" {
			w.Template = ref.String()
		}
	}
	resume := b.Object("autoResume")
	if b.Has("autoResume") {
		resume.Require("enabled")
	}
	w.AutoResume = resume.Bool("enabled", false)
	w.Network = readNetwork(b.Object("network"))
	checkMetadata(b, w.Metadata)
	w.Profile = readProfile(b, w.Metadata)
	checkEnv(b, "envVars", w.Env)
	if err := c.checked(); err != nil {
		return w, err
	}
	switch {
	case g.secure && !w.Secure:
		return w, invalid("secure: sandboxes of /v2 always are")
	case !w.AutoPauseMemory && !w.AutoPause:
		return w, invalid("autoPauseMemory: false is how to pause automatically, so it needs autoPause: true")
	case !w.AutoPauseMemory && w.AutoResume:
		return w, invalid("autoPauseMemory: a sandbox that was paused without its memory isn't resumed by traffic: autoResume.enabled can't be true")
	case w.Network.AllowPublicTraffic != nil && !*w.Network.AllowPublicTraffic && !w.Secure:
		return w, invalid(securePublic)
	}
	return w, nil
}

// timeoutIn is how long a sandbox is to run, from so many seconds on. What is too long, the engine knows; that a client asks for
// nothing is never that.
func (s *Server) timeoutIn(b *jsonbody.Object, byDefault, least int) time.Duration {
	d := time.Duration(b.Int("timeout", byDefault, least, math.MaxInt32)) * time.Second
	if most := s.options.MaxTimeout; most > 0 && !b.Has("timeout") {
		return min(d, most)
	}
	return d
}

// readAllowInternet is nil if the client says nothing of it.
func readAllowInternet(b *jsonbody.Object) *bool {
	const name = "allow_internet_access"
	allow := b.Bool(name, true)
	if !b.Has(name) {
		return nil
	}
	return &allow
}

// readProfile is how much of what a sandbox has is to be reserved for it, as its metadata say.
func readProfile(b *jsonbody.Object, metadata map[string]string) admission.Profile {
	p, err := admission.ParseProfile(metadata[profileKey])
	if err != nil {
		b.Fail(jsonbody.Key("metadata", profileKey), "%v", err)
	}
	return p
}

func checkMetadata(b *jsonbody.Object, m map[string]string) {
	size := 0
	for _, k := range slices.Sorted(maps.Keys(m)) {
		size += len(k) + len(m[k])
		if strings.Contains(k, "\x00") {
			b.Fail(jsonbody.Key("metadata", k), "a key can't have NUL in it")
		}
	}
	if size > maxMetadata {
		b.Fail("metadata", "it has %d bytes, there can be %d", size, maxMetadata)
	}
}

// checkEnv refuses what no process can be started with, and what would be ignored. member is where it is in the body.
func checkEnv(b *jsonbody.Object, member string, env map[string]string) {
	size := 0
	for _, name := range slices.Sorted(maps.Keys(env)) {
		value := env[name]
		size += len(name) + len(value)
		at := jsonbody.Key(member, name)
		switch {
		case lifecycle.Reserved(name):
			b.Fail(at, "it is the sandbox's own, which nobody can set")
		case name == "" || strings.ContainsAny(name, "=\x00"):
			b.Fail(at, "a variable's name can't be empty, nor have = or NUL in it")
		case strings.Contains(value, "\x00"):
			b.Fail(at, "a variable's value can't have NUL in it")
		case len(name)+len(value)+2 > maxEnv:
			b.Fail(at, "no process can have a variable of more than %d bytes", maxEnv)
		}
	}
	if size > maxAllEnv {
		b.Fail(member, "they have %d bytes, there can be %d", size, maxAllEnv)
	}
}
