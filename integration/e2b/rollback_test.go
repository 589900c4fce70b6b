package e2b

import (
	"context"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
)

// TestRollback: a sandbox is what it was when its snapshot was made, under its id and with its token, and who was connected to
// what it has been since isn't any more.
func TestRollback(t *testing.T) {
	c := newClient(t)
	sb := c.create(nil)
	c.marks(sb, "before")
	c.says(sb, "echo before > f; echo done", "done")
	var snapshot struct {
		ID string `json:"snapshotID"`
	}
	c.do("POST", "/sandboxes/"+sb.ID+"/snapshots", map[string]string{"name": "here"}, &snapshot, 201)
	c.says(sb, "echo after > f; touch g; echo after > /dev/shm/word; pkill -f '^before 36000'; echo done", "done")

	ctx, cancel := context.WithTimeout(t.Context(), s.Config.Timeout(2*time.Minute))
	defer cancel()
	req := connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/sleep", Args: []string{"3600"}}, Stdin: new(bool)})
	for k, v := range map[string]string{"E2b-Sandbox-Id": sb.ID, "E2b-Sandbox-Port": "49983", "X-Access-Token": sb.Token} {
		req.Header().Set(k, v)
	}
	events, err := process.NewProcessClient(c.http, "http://"+s.Config.Proxy.Listen.String()).Start(ctx, req)
	if err != nil || !events.Receive() {
		t.Fatal(err, events.Err())
	}
	defer events.Close()
	c.do("POST", "/sandboxes/"+sb.ID+"/rollback", map[string]string{"snapshotID": snapshot.ID}, nil, 204)
	for events.Receive() {
		if end := events.Msg().GetEvent().GetEnd(); end != nil {
			t.Errorf("a command in the machine of before is told to have ended: %s", end.GetStatus())
		}
	}
	if events.Err() == nil || ctx.Err() != nil {
		t.Errorf("a stream into the machine of before ends with %v, %v", events.Err(), ctx.Err())
	}
	c.goesOn(sb, "before")
	c.says(sb, "cat f; ls g 2>/dev/null; date +%Y", "before\n"+time.Now().Format("2006"))

	// Whoever goes past the engine would leave streams, and the sandbox's programs, in the dark.
	if r := s.Cube("rollback", sb.ID, "any"); r.Err == nil || !strings.Contains(r.Stderr, "POST /sandboxes/"+sb.ID+"/rollback") {
		t.Errorf("cube rollback: %v %s", r.Err, r.Stderr)
	}
	c.do("DELETE", "/sandboxes/"+sb.ID, nil, nil, 204)
	c.do("DELETE", "/templates/"+strings.ReplaceAll(snapshot.ID, "/", "%2F"), nil, nil, 204)
}
