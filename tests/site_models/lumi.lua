-- What slurm.conf cannot say without an accounting database: an account is needed.
function slurm_job_submit(job, partitions, user)
    if job.account == nil then
        slurm.log_user("the model of LUMI: --account is missing")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, user)
    return slurm.SUCCESS
end
