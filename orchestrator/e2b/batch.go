package e2b

import (
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cubesandbox/cube/orchestrator/batch"
	"github.com/cubesandbox/cube/orchestrator/e2b/jsonbody"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// What a batch is where a client doesn't say, and what it may be.
const (
	batchTimeout      = 300 // seconds, of an item
	batchDeadline     = 3600
	batchDeadlineMost = 24 * 3600
	batchAtOnce       = 16 // sandboxes
	batchAtOnceMost   = 100
	maxCommand        = 64 << 10 // bytes; Linux lets an argument have twice as many
)

// batch runs a command in a sandbox for each item, and tells how each has gone. It is given up when the client goes.
func (s *Server) batch(c *call, to *batchLines) error {
	wanted, err := s.readBatch(c)
	if err != nil {
		return err
	}
	b := &batch.Batch{Request: wanted, Sandboxes: s.engine, Metrics: s.batches, Log: s.log.With("request", c.id), Scale: s.timeout}
	to.of.Store(b)
	if err := to.ping(); err != nil { // the client knows that it has begun
		return err
	}
	sum, err := b.Run(c.ctx, func(r batch.Result) error { return to.send(s.result(c, r)) })
	if err != nil {
		return err
	}
	return to.send(summaryLine{
		Type: "summary", Count: len(wanted.Envs), OK: sum.Count[batch.OK], Failed: sum.Count[batch.Failed], Refused: sum.Count[batch.Refused],
		Timeout: sum.Count[batch.Timeout], TookMS: sum.Took.Milliseconds(),
	})
}

// readBatch checks all that can be checked before there is a sandbox.
func (s *Server) readBatch(c *call) (batch.Request, error) {
	b := c.body
	b.Require("template")
	b.Require("cmd")
	r := batch.Request{
		Create: lifecycle.Create{
			Team: c.team, Secure: true, AllowInternet: readAllowInternet(b), Network: readNetwork(b.Object("network")),
			Metadata: b.StringMap("metadata"), Env: b.StringMap("envVars"),
		},
		Envs: readItems(b, s.options.MaxBatch), Command: b.String("cmd"),
		Timeout:  s.timeoutIn(b, batchTimeout, 1),
		Deadline: time.Duration(b.Int("deadline", batchDeadline, 1, batchDeadlineMost)) * time.Second, MaxTimeout: s.options.MaxTimeout,
		Concurrency: b.Int("concurrency", batchAtOnce, 1, batchAtOnceMost),
	}
	if most := s.options.MaxTimeout; most > 0 && r.Timeout > most {
		b.Fail("timeout", "%v is more than sandboxes here may run, which is %v", r.Timeout, most)
	}
	if b.Has("cmd") {
		checkCommand(b, r.Command)
	}
	checkMetadata(b, r.Create.Metadata)
	r.Create.Profile = readProfile(b, r.Create.Metadata)
	checkEnv(b, "envVars", r.Create.Env)
	common := sizeOf(r.Create.Env)
	for i, env := range r.Envs {
		at := jsonbody.Index("envs", i)
		checkEnv(b, at, env)
		if size := common + sizeOf(env); size > maxAllEnv {
			b.Fail(at, "with envVars they have %d bytes, there can be %d", size, maxAllEnv)
		}
	}
	if !b.Has("template") {
		return r, c.checked()
	}
	ref, image, err := parseOrigin("template", b.String("template"))
	c.note(err)
	if err := c.checked(); err != nil {
		return r, err
	}
	if r.Create.Image = image; image != "" {
		return r, nil
	}
	r.Create.Template = ref.String()
	_, err = s.templates.Template(c.ctx, c.team, ref) // which all items would be refused for
	return r, err
}

// readItems are the variables of each item.
func readItems(b *jsonbody.Object, most int) []map[string]string {
	envs := b.StringMaps("envs")
	n := b.Int("count", len(envs), 1, most)
	switch {
	case b.Failed() != nil:
		return nil
	case !b.Has("count") && len(envs) == 0:
		b.Fail("count", "it is required where there are no envs")
		return nil
	case len(envs) == 0:
		return make([]map[string]string, n)
	case n != len(envs):
		b.Fail("count", "%d isn't how many envs there are, which is %d", n, len(envs))
	case n > most:
		b.Fail("envs", "there are %d, there can be %d", n, most)
	}
	return envs
}

func checkCommand(b *jsonbody.Object, cmd string) {
	switch {
	case strings.TrimSpace(cmd) == "":
		b.Fail("cmd", "it is empty")
	case strings.Contains(cmd, "\x00"):
		b.Fail("cmd", "a command can't have NUL in it")
	case len(cmd) > maxCommand:
		b.Fail("cmd", "it has %d bytes, there can be %d", len(cmd), maxCommand)
	}
}

// sizeOf is how many bytes variables have.
func sizeOf(env map[string]string) (size int) {
	for name, value := range env {
		size += len(name) + len(value)
	}
	return size
}

// batchLines is an answer in JSON, a line for each thing that is told.
type batchLines struct {
	*output
	of atomic.Pointer[batch.Batch] // nil before it has begun
}

func newBatchLines(o *output) *batchLines {
	o.kind = "application/x-ndjson"
	return &batchLines{output: o}
}

func (l *batchLines) send(line any) error { return l.write(oneLine(line)) }

// ping tells how far the batch is.
func (l *batchLines) ping() error {
	b := l.of.Load()
	if b == nil {
		return nil
	}
	p := b.Progress()
	return l.send(progressLine{Type: "progress", Count: len(b.Envs), Done: p.Done, Running: p.Running})
}

func (l *batchLines) fail(body errorBody) error {
	return l.send(struct {
		Type string `json:"type"`
		errorBody
	}{"error", body})
}

type progressLine struct {
	Type    string `json:"type"`
	Count   int    `json:"count"`
	Done    int    `json:"done"`
	Running int    `json:"running"`
}

type resultLine struct {
	Type      string       `json:"type"`
	Index     int          `json:"index"`
	SandboxID string       `json:"sandboxID,omitempty"`
	Status    batch.Status `json:"status"`
	// ExitCode is of a command that has ended, -1 where a signal has ended it.
	ExitCode *int `json:"exitCode,omitempty"`
	// Error is why it isn't ok, in words.
	Error  string `json:"error,omitempty"`
	Stdout string `json:"stdout"`
	Stderr string `json:"stderr"`
	// Bytes of the beginning that are left out.
	StdoutOmitted int64 `json:"stdoutOmitted,omitempty"`
	StderrOmitted int64 `json:"stderrOmitted,omitempty"`
	WaitMS        int64 `json:"waitMs"`
	CreateMS      int64 `json:"createMs"`
	RunMS         int64 `json:"runMs"`
}

type summaryLine struct {
	Type    string `json:"type"`
	Count   int    `json:"count"`
	OK      int    `json:"ok"`
	Failed  int    `json:"failed"`
	Refused int    `json:"refused"`
	Timeout int    `json:"timeout"`
	TookMS  int64  `json:"tookMs"`
}

func (s *Server) result(c *call, r batch.Result) resultLine {
	l := resultLine{
		Type: "result", Index: r.Index, SandboxID: r.SandboxID, Status: r.Status, Stdout: r.Stdout.String(), Stderr: r.Stderr.String(),
		StdoutOmitted: r.Stdout.Omitted(), StderrOmitted: r.Stderr.Omitted(),
		WaitMS: r.Waited.Milliseconds(), CreateMS: r.Made.Milliseconds(), RunMS: r.Ran.Milliseconds(),
	}
	if r.Exit != nil {
		l.ExitCode = &r.Exit.Code
		if r.Exit.Code != 0 {
			l.Error = r.Exit.Status
		}
	}
	if r.Err != nil {
		why, _ := explain(r.Err, c.id)
		if why.Code == http.StatusInternalServerError {
			s.log.Error("an item of a batch has failed", "request", c.id, "item", r.Index, "sandbox", r.SandboxID, "error", r.Err)
		}
		l.Error = strings.ReplaceAll(why.Message, "\n", "; ")
	}
	return l
}
