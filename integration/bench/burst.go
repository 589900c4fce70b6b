package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// crowd is how many sandboxes are asked for at once.
const crowd = 50

// still is how long it is measured what so many sandboxes take that do nothing.
const still = 10 * time.Second

// bursts measures how long it takes until sandboxes can all be used that are asked for at once, before the pool has any for them, and
// when it has all of them.
func bursts(ctx context.Context, root string) error {
	return onStack(ctx, root, (*user).bursts, fmt.Sprintf("[pool]\nmax_memory = \"%dMiB\"\nmax_per_template = %d", 512*crowd, crowd))
}

func (u *user) bursts() error {
	d, err := db.Open(u.ctx, u.Config.DatabaseFile())
	if err != nil {
		return err
	}
	defer d.Close()
	fmt.Printf("\n### %d at once\n\nThe same template. A create that is told to try again does so when it is told to.\n\n"+
		"| | of the pool | the first ms | half of them ms | all ms | told to try again | load before |\n| --- | --- | --- | --- | --- | --- | --- |\n", crowd)
	begun, err := available()
	if err != nil {
		return err
	}
	made, err := u.burst("the pool has none", nil)
	if err != nil {
		return err
	}
	idle, err := u.busy()
	if err != nil {
		return err
	}
	there, err := available()
	if err != nil {
		return err
	}
	if err := u.kill(made...); err != nil {
		return err
	}
	// What is asked for is half forgotten after five minutes: once isn't enough for as many members.
	if made, err = u.burst("the pool has what it has made meanwhile", nil); err != nil {
		return err
	}
	if err := u.kill(made...); err != nil {
		return err
	}
	kept, err := u.filled(d, crowd)
	if err != nil {
		return err
	}
	waiting, err := u.busy()
	if err != nil {
		return err
	}
	if made, err = u.burst("the pool has all", kept); err != nil {
		return err
	}
	if err := u.kill(made...); err != nil {
		return err
	}
	fmt.Printf("\n%d sandboxes that do nothing take %.2f CPUs in all, and %.0f MiB of the host's memory each; as many members of the pool %.2f CPUs.\n", crowd, idle, float64(begun-there)/1024/crowd, waiting)
	return nil
}

// burst makes that many at once.
func (u *user) burst(name string, kept map[string]bool) ([]sandbox, error) {
	load := loadNow()
	before, err := u.metric(hits)
	if err != nil {
		return nil, err
	}
	made, took, again := make([]sandbox, crowd), make(sample, crowd), make([]int, crowd)
	var g errgroup.Group
	began := time.Now()
	for i := range crowd {
		g.Go(func() (err error) {
			made[i], again[i], err = u.insist()
			took[i] = time.Since(began)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	after, err := u.metric(hits)
	if err != nil {
		return nil, err
	}
	for _, sb := range made {
		delete(kept, sb.ID)
	}
	told := 0
	for _, n := range again {
		told += n
	}
	fmt.Printf("| %s | %.0f | %.0f | %.0f | %.0f | %d times | %s |\n", name, after-before, ms(took.quantile(0)), ms(took.quantile(0.5)), ms(took.quantile(1)), told, load)
	if len(kept) > 0 {
		return nil, fmt.Errorf("%d members of the pool weren't taken", len(kept))
	}
	return made, nil
}

// insist is create for who tries again when he is told to, as E2B's clients do.
func (u *user) insist() (sb sandbox, again int, err error) {
	for end := time.Now().Add(u.Config.Timeout(5 * time.Minute)); ; again++ {
		sb, _, err = u.create()
		var r *refusal
		if !errors.As(err, &r) || r.after == 0 || time.Now().After(end) {
			return sb, again, err
		}
		select {
		case <-time.After(r.after):
		case <-u.ctx.Done():
			return sb, again, u.ctx.Err()
		}
	}
}

// refusal is an answer without success.
type refusal struct {
	message string
	after   time.Duration // 0: it isn't worth another try
}

func (r *refusal) Error() string { return r.message }

func refused(resp *http.Response, body []byte) *refusal {
	r := &refusal{message: fmt.Sprintf("%s %s: %s: %.300s", resp.Request.Method, resp.Request.URL, resp.Status, body)}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		r.after = time.Duration(seconds) * time.Second
	}
	return r
}

// busy tells how many of the host's CPUs are, in a while from now on.
func (u *user) busy() (float64, error) {
	var told struct {
		CPU struct {
			Used float64 `json:"used"`
		} `json:"cpu"`
	}
	if err := u.api(http.MethodGet, "/capacity", "", &told); err != nil {
		return 0, err
	}
	select {
	case <-time.After(still):
	case <-u.ctx.Done():
		return 0, u.ctx.Err()
	}
	err := u.api(http.MethodGet, "/capacity", "", &told)
	return told.CPU.Used, err
}

// metric is the value of one of cube's, 0 if it isn't there yet.
func (u *user) metric(name string) (float64, error) {
	req, err := http.NewRequestWithContext(u.ctx, http.MethodGet, "http://"+u.Config.API.Listen.String()+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	text, err := u.do(req)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, nil
}
